"""Attention kernels of single platforms, each an `Attend` that says which calls it refuses."""
