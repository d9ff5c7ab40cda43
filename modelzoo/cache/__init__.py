"""The cache of keys, values and latents: where tokens lie in it, and how it is written."""
