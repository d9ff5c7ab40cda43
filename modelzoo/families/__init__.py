"""Families of models as data: their published configurations and tensor names."""
