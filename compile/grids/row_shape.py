"""The lengths of a row, as grids are derived from them.

Does not know about requests.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class RowShape:
    """Lengths of one admissible row of a job, as the scan found them."""

    prompt_length: int
    max_tokens: int | None
    num_sequences: int = 1
    is_scored: bool = False
    min_output: int = 0
    """Number of tokens of the shortest answer of its form; 0 without a form."""

    def num_slots(self, *, has_chunks: bool) -> int:
        """Number of slots of the row; with chunks, a prompt needs one even without output."""
        return int(has_chunks) if self.max_tokens == 0 else self.num_sequences

    @property
    def is_only_scored(self) -> bool:
        """Whether the row needs no slot if prompts run whole."""
        return self.is_scored and self.max_tokens == 0

    @property
    def min_length(self) -> int:
        """Minimum number of positions with which the row can run."""
        return self.prompt_length + (1 if self.max_tokens is None else self.max_tokens)

    def fits(self, max_length: int) -> bool:
        """Whether the row can run with this many positions, and with an answer of its form."""
        room = max_length - self.prompt_length
        limit = room if self.max_tokens is None else self.max_tokens
        return self.min_length <= max_length and self.min_output <= limit
