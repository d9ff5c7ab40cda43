"""What is known of a graph's attention before it is traced: kernels say by it what they refuse.

Knows nothing of platforms or meshes.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from ..config import Chunk, Scores, Window


@dataclass(frozen=True)
class AttentionCall:
    """Attention of all layers of one graph."""

    num_queries: int
    """Queries of a row: the tokens of a prompt or of a chunk of it, or 1."""
    key_dim: int
    value_dim: int
    dtype: jnp.dtype
    windows: frozenset[Window]
    """Of the layers, each once."""
    scores: Scores
    has_sinks: bool
    is_in_order: bool = False
    """As `Visibility.is_in_order`."""
    segments: frozenset[int] = frozenset()
    """For chunks of prompts on devices that run code of their own: the entries of the cache's
    segments that a device attends to, each number once."""

    def __str__(self) -> str:
        seen = sorted(_mask(window) for window in self.windows)
        return f"{self.dtype.name}, heads of {self.key_dim}, {' and '.join(seen)}"


def _mask(window: Window) -> str:
    if window is None:
        return "causal"
    return str(window) if isinstance(window, Chunk) else f"windows of {window}"
