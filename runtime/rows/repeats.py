"""Finds rows with equal requests, so that a job computes one of them and answers all of them.

Two rows are equal if they have the same prompt ids, sampling parameters and kind of request, and if
their sampling does not depend on their ids: it is greedy, has a seed, or does not happen because
the prompt is only scored. The scan keeps eight bytes for each row, a digest of its request. Digests
of different requests may collide, so an output is given to a row only after an exact comparison.

Does not know about files, devices or the journal. Guarantees: a row never gets the output of a row
that is not equal to it; an output is kept only until the rows that repeat it are answered.
"""

import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import RowError
from ..request import RequestOutput
from .lines import BatchRow
from .scan import ScannedRow

ANSWERED_PER_STEP = 64
"""Maximum number of rows that one output answers in a step, so that a signal is seen in time."""
_NO_DIGEST = 0


@dataclass(frozen=True)
class Repeats:
    """Rows that are not computed, because they seem to repeat rows that are computed."""

    rows: Sequence[ScannedRow] = ()
    """Sorted by the row that they repeat, then as in the input."""
    firsts: Sequence[int] = ()
    """The index in the input of the row that each of `rows` repeats."""

    def of(self, row: int) -> Sequence[ScannedRow]:
        """The rows that repeat the row with an index; empty for most rows."""
        return self.rows[bisect_left(self.firsts, row) : bisect_right(self.firsts, row)]


class RowDigests:
    """The digests of scanned rows, eight bytes each."""

    def __init__(self):
        self._digests = array("Q")

    def add(self, row: BatchRow, ids: Sequence[int]) -> None:
        """Add a row and its prompt ids; rows must be passed in order, each at most once."""
        params = row.params
        if params.seed is None and params.temperature != 0 and params.max_tokens != 0:
            return  # the seed is derived from the id, and has an effect
        self._digests.extend([_NO_DIGEST] * (row.row - len(self._digests)))
        self._digests.append(_digest(row, ids))

    def split(self, rows: Sequence[ScannedRow]) -> tuple[Sequence[ScannedRow], Repeats]:
        """Split rows into those to compute, in the same order, and those that repeat them."""
        if not self._digests:
            return rows, Repeats()
        import numpy as np  # a job that has finished does not wait for this import

        known = self._digests
        own = (known[row.row] if row.row < len(known) else _NO_DIGEST for row in rows)
        digests = np.fromiter(own, np.uint64, len(rows))
        places = np.arange(len(rows))
        _, first_places, groups = np.unique(digests, return_index=True, return_inverse=True)
        firsts = np.where(digests == _NO_DIGEST, places, first_places[groups])
        repeats = np.flatnonzero(firsts != places)
        repeats = repeats[np.argsort(firsts[repeats], kind="stable")]
        computed = [rows[place] for place in np.flatnonzero(firsts == places).tolist()]
        first_rows = array("q", (rows[place].row for place in firsts[repeats].tolist()))
        return computed, Repeats([rows[place] for place in repeats.tolist()], first_rows)


@dataclass(frozen=True)
class Answer:
    """The output of a row, and the rows that seem to repeat the row and are not answered yet."""

    row: BatchRow
    output: RequestOutput
    repeats: deque[ScannedRow]

    def take(self) -> Iterator[ScannedRow]:
        """Remove and yield the rows to answer in one step."""
        for _ in range(min(len(self.repeats), ANSWERED_PER_STEP)):
            yield self.repeats.popleft()

    def fits(self, row: BatchRow, ids: Sequence[int]) -> bool:
        """Whether a row with these prompt ids is equal to the row of this output."""
        return _request(row) == _request(self.row) and list(ids) == self.output.prompt_token_ids

    def output_for(self, row: BatchRow) -> RequestOutput:
        """The output for an equal row: with that row's id, and without times, as it did not run."""
        error = self.output.error
        if error is not None:
            message = _rename(error.message, self.row.custom_id, row.custom_id)
            error = RowError(error.code, message, error.param)
        return replace(
            self.output, request_id=row.custom_id, prompt=row.prompt, error=error, metrics=None
        )


def _request(row: BatchRow) -> tuple[object, ...]:
    """Everything besides the prompt that decides a row's answer."""
    return row.kind, row.echo, row.logprobs, row.prompt_logprobs, row.params, row.adapter


def _digest(row: BatchRow, ids: Sequence[int]) -> int:
    digest = hashlib.blake2b(repr(_request(row)).encode("utf-8", "surrogatepass"), digest_size=8)
    digest.update(array("I", ids))
    return int.from_bytes(digest.digest(), "big")


def _rename(message: str, old: str, new: str) -> str:
    """The message of an error with another request's id, if it names the request."""
    name = f"request {old!r}: "
    return f"request {new!r}: {message.removeprefix(name)}" if message.startswith(name) else message
