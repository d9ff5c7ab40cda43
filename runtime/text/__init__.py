"""Text and token ids: tokenizers, chat templates and incremental decoding. Never imports jax."""
