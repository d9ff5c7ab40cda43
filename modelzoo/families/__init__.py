"""Families of models as data: published configurations and tensor names, nothing else."""
