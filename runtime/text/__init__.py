"""Text and token ids: tokenizers, chat templates, text as it grows. Never imports jax."""
