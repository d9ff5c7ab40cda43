"""Attention: the primitive on arrays, its blocks and segments, and the attention of a layer."""
