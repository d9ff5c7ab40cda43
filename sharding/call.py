"""The shape of a call: how many rows and tokens a graph takes, and what of the cache it reads.

Knows nothing of models, layouts or grids.
"""

from collections.abc import Iterator
from dataclasses import dataclass

KINDS = ("prefill", "chunk", "decode")
Segments = tuple[tuple[int, int], ...]
"""Rows and end of each piece of a cache; each begins where the last one ends."""


@dataclass(frozen=True)
class Call:
    """Shape of one call of a graph; of decode, of one step of it."""

    phase: str
    """Of `KINDS`: calls whose time has the same causes."""
    rows: int
    tokens: int
    """Of a row: of the prompt or chunk, and 1 in decode."""
    span: int
    """Positions that a token may see: the tokens themselves in a whole prompt."""
    is_scored: bool = False
    """Whether every token gets logits, not the last of each row alone."""
    segments: Segments = ()
    """The pieces of the cache, where there is more than one."""

    @classmethod
    def of_step(cls, slots: int, span: int) -> "Call":
        """One decode step of slots that are all alike."""
        return cls("decode", slots, 1, span)

    @property
    def num_tokens(self) -> int:
        return self.rows * self.tokens

    @property
    def num_logits(self) -> int:
        """Tokens that get logits."""
        return self.num_tokens if self.is_scored else self.rows

    @property
    def pieces(self) -> Iterator[tuple[int, int, int]]:
        """Rows, start and end of each piece of the cache."""
        return pieces(self.segments or ((self.rows, self.span),))


def pieces(segments: Segments) -> Iterator[tuple[int, int, int]]:
    """Rows, start and end of each piece of a cache."""
    start = 0
    for rows, end in segments:
        yield rows, start, end
        start = end
