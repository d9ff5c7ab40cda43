"""Attention kernels for single platforms, each with a function that refuses unsupported calls."""
