"""Sampling parameters and options: their names in other libraries, and checks of their values."""
