"""Products with weights in float, in codes, and with adapters."""
