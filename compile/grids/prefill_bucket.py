"""The shape of a prefill graph, and its spellings in Python and in the table of a plan.

Knows nothing of other shapes of a plan. The numbers themselves are checked with the whole grid.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from ...modelzoo.errors import UserError
from ...sharding.call import Call


class PrefillBucket(NamedTuple):
    """The shape of a prefill graph: tokens per row, and rows."""

    length: int
    """The longest prompt; for prompts in chunks, the longest row. Unit: tokens."""
    batch: int
    """The prompts, or pieces of prompts, of one call. Unit: rows."""
    chunk: int | None = None
    """The largest piece of a prompt; None prefills prompts whole. Unit: tokens."""

    @property
    def tokens(self) -> int:
        """Tokens of one row in a call."""
        return self.chunk or self.length

    @property
    def is_whole(self) -> bool:
        """Whether a piece is all that its row sees, so that it begins at position 0."""
        return self.tokens == self.length

    def call(self) -> Call:
        """The shape of a call of the graph; with chunks, of a call of pieces."""
        phase = "prefill" if self.is_whole else "chunk"
        return Call(phase, self.batch, self.tokens, self.length)

    def __str__(self) -> str:
        """Tokens and rows: `256x4`."""
        return f"{self.tokens}x{self.batch}"


def as_bucket(entry: object) -> PrefillBucket:
    """The bucket of a plain `(length, batch)` or `(length, batch, chunk)`.

    Raises:
      ValueError: It is neither.
    """
    if not isinstance(entry, tuple | list) or len(entry) not in (2, 3):
        raise UserError(f"buckets.prefill: expected pairs of length and batch, got {entry!r}.")
    return PrefillBucket(*entry)


def entry_buckets(entry: object, chunks: Sequence[int]) -> list[PrefillBucket]:
    """The buckets of one entry of a plan's table, which has a batch for each chunk.

    Raises:
      ValueError: The number of its batches is not the number of chunks, or 1 without chunks.
    """
    if not isinstance(entry, tuple | list) or len(entry) != 1 + max(1, len(chunks)):
        wanted = "pairs of length and batch"
        if chunks:
            wanted = f"a length and a batch for each of buckets.chunk {list(chunks)}"
        raise UserError(f"buckets.prefill: expected {wanted}, got {entry!r}.")
    length, *batches = entry
    pairs = zip(batches, chunks or (None,), strict=True)
    return [PrefillBucket(length, batch, chunk) for batch, chunk in pairs]


def distinct_lengths(buckets: Sequence[PrefillBucket]) -> list[int]:
    """The lengths of buckets that are in order of length, each once."""
    return [length for length, _ in groupby(bucket.length for bucket in buckets)]
