"""Facts about the attention of a graph, known before it is traced, by which kernels refuse calls.

Knows nothing of platforms or meshes.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from ..layer_config import BothSides, Chunk, Scores, Window


@dataclass(frozen=True)
class AttentionCall:
    """The attention of all layers of one graph."""

    num_queries: int
    """The queries of a row: the tokens of a prompt or of a chunk, or 1 in decode."""
    key_dim: int
    value_dim: int
    dtype: jnp.dtype
    windows: frozenset[Window]
    """The windows of the layers."""
    scores: Scores
    has_sinks: bool
    is_in_order: bool = False
    """See `Visibility.is_in_order`."""
    codes: str | None = None
    """The name of the codes of the cache's entries (`entry_codes`); None if they are in none."""
    splits: tuple[int, ...] = ()
    """The features at which the parts of a latent after the first one begin; empty if the cache has
    keys and values of heads. Codes of each part have a scale of their own."""
    group: int = 1
    """The query heads of a key/value head."""
    page: int | None = None
    """The entries of a page of the cache; None for whole prompts, which attend to themselves. With
    pages, `key_dim` and `value_dim` are the sizes of cached heads, with the zeros that pad them."""
    device: str | None = None
    """The kind of the devices, as `h100`; None if it is not known."""
    stripes: int = 1
    """The devices over which the entries of each page are split."""
    is_placed: bool = True
    """Whether there is one device, or a layout for several; without it, no kernel over pages can
    be split over them."""
    table: int = 0
    """The pages in the table of a device: those of all its rows, at their maximum length."""

    @property
    def sees_later(self) -> bool:
        """Whether queries see keys after them in some layer."""
        return any(isinstance(window, BothSides) for window in self.windows)

    def __str__(self) -> str:
        seen = sorted(_mask(window) for window in self.windows)
        return f"{self.dtype.name}, heads of {self.key_dim}, {' and '.join(seen)}"


def _mask(window: Window) -> str:
    if window is None:
        return "causal"
    return str(window) if isinstance(window, Chunk | BothSides) else f"windows of {window}"
