"""Grids of buckets: the type, its defaults, and the choice of prefill lengths, slots and pages."""
