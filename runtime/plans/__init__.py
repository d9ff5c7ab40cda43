"""Plans against models and devices: what a plan resolves to, and whether a model can run it."""
