"""Sizes of latent attention, as a frozen dataclass.

Knows nothing of other attention. Guarantees: sizes are positive integers.
"""

from dataclasses import dataclass

from .config_values import check_count, check_positive


@dataclass(frozen=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1).

    Keys and values of all heads are computed from one latent per token. A head of queries and keys
    has `plain_dim` features of its own and `rope_dim` rotated features. The rotated key is the same
    for all heads.
    """

    rank: int
    """The size of the latent of keys and values."""
    plain_dim: int
    """The features of a query or key head that are not rotated."""
    rope_dim: int
    """The features of a query or key head that are rotated."""
    value_dim: int
    """The features of a value head."""
    query_rank: int | None = None
    """The size of the latent of queries; None means that queries are computed without a latent."""
    norm_epsilon: float = 1e-6
    """Epsilon of the norms of latents."""

    def __post_init__(self):
        check_positive("latent", norm_epsilon=self.norm_epsilon)
        for name in ("rank", "plain_dim", "rope_dim", "value_dim", "query_rank"):
            if (size := getattr(self, name)) is not None:
                check_count(f"latent.{name}", size)

    @property
    def head_dim(self) -> int:
        """The size of a query or key head."""
        return self.plain_dim + self.rope_dim

    @property
    def cache_dim(self) -> int:
        """The size of a cache entry: the latent and the rotated key."""
        return self.rank + self.rope_dim
