"""The shape of a call: the rows and tokens of a graph, and the part of the cache that it reads.

Knows nothing of models, layouts or grids.
"""

from dataclasses import dataclass

KINDS = ("prefill", "chunk", "decode")


@dataclass(frozen=True)
class Call:
    """Shape of one call of a graph; for decode, of one step of the call."""

    phase: str
    """One of `KINDS`. The times of all calls of one kind have the same causes."""
    rows: int
    tokens: int
    """Tokens of each row: the length of the prompt or chunk, or 1 in decode."""
    span: int
    """Positions that a token may see; in a whole prompt, the prompt's own tokens."""
    is_scored: bool = False
    """Whether every token gets logits, and not only the last token of each row."""
    is_embedded: bool = False
    """Whether no token gets logits, as texts become vectors."""
    entries: float | None = None
    """The cache entries, in whole pages, that all rows of a decode step or a call of chunks read;
    None for whole prompts, which read none."""
    seen: float | None = None
    """In a decode step, these entries with those that are read once for several rows counted for
    each of them; None for the same number."""
    page: int = 0
    """The entries of a page; 0 for whole prompts."""

    @property
    def num_tokens(self) -> int:
        return self.rows * self.tokens

    @property
    def num_logits(self) -> int:
        """Number of tokens that get logits."""
        if self.is_embedded:
            return 0
        return self.num_tokens if self.is_scored else self.rows
