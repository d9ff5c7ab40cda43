"""Compiled programs, read from their text: bytes, loops, conversions, cycles, communication."""
