"""Declared boundaries: ops that carry their placement rule, their FLOP formula and their backward."""
