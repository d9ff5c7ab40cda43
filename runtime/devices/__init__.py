"""This machine and its devices: their properties, their memory, and transfers to them."""
