"""Plans: every decision of a parallel training run, as data."""
