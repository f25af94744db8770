"""Training frameworks that can use a compiled model: one module each."""
