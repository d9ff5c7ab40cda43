"""Formats of published tensors: safetensors, GGUF, and weights in codes of few bits."""
