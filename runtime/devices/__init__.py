"""This machine and its devices: what they are, their memory, and transfers to them."""
