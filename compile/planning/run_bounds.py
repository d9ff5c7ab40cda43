"""Bounds of the time of any run of a workload on a grid, and the time to expect.

The bound is the time of a run in which every call is full. No schedule is faster. So a candidate
whose bound is above the time of another candidate's complete schedule cannot be the best.
Beginnings that prompts share count once in the bound of chunks, because they may be computed once.
Likewise, every schedule computes at least the prompt tokens of the full calls that hold all pieces.
So a candidate that already pads too much by this count is excluded, whatever its schedule.

A step costs what its rows read. So the bound has the fewest steps that may emit all tokens, and the
entries that these tokens read: whole pages, up to the token itself. No step reads more entries than
the pool has, unless rows share pages. Each piece of a prompt reads whole pages up to its own end.

The bound does not count slots that are idle until enough rows fill a prefill call: of chunks, whose
rows wait in their slots, or of whole prompts, whose rows wait for slots. The expected time of a
candidate counts it. It orders the candidates for the search, and excludes none.

Knows nothing of the choice of grids. Every time here is a prediction.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..grids.bucket_grid import BucketGrid
from ..grids.grid_defaults import round_up
from ..grids.prefill_bucket import PrefillBucket
from ..grids.prefix_table import PrefixTable
from ..grids.row_shape import RowShape
from .compile_time import GraphSeconds
from .cost import CostModel

MAX_IDLE_SHARE = 0.9
"""Maximum expected share of waiting slots, however large batches are."""


@dataclass(frozen=True)
class ExpectedRow:
    """A row of a workload, and the number of tokens that it is expected to emit."""

    need: RowShape
    output: int
    """Expected output tokens of each of its sequences, a stop id included."""
    ends_on_host: bool = False
    """Whether a stop string ends the row."""

    def limit(self, max_length: int) -> int:
        """Maximum total length of its sequences."""
        max_tokens = self.need.max_tokens
        return max_length if max_tokens is None else self.need.prompt_length + max_tokens


@dataclass(frozen=True)
class Candidate:
    """A grid, and a lower bound of the seconds of its build and any run of it."""

    grid: BucketGrid
    bound: float
    expected: float
    """Expected seconds; candidates are tried in this order."""
    padding: float
    """Minimum ratio of computed to real prompt tokens."""


class _Pieces(NamedTuple):
    """Numbers of prompts, or of pieces of prompts, for each prefill bucket."""

    every: list[int]
    saved: list[int]
    """The number among them that an earlier row has, too."""


def _full_calls(grid: BucketGrid, pieces: _Pieces) -> dict[PrefillBucket, int]:
    """The number of full calls of each bucket."""
    return {
        bucket: -(-(count - less) // bucket.batch)
        for bucket, count, less in zip(grid.prefill, pieces.every, pieces.saved, strict=True)
    }


class RunBounds:
    """The bounds of one workload.

    Args:
      rows: The rows.
      max_length: The length at which rows without `max_tokens` end.
      cost: The seconds of calls.
      graph_seconds: The seconds to compile a graph.
      count_R: The number of slots that the sequences of each row need.
      table: The pieces that prompts share.
    """

    def __init__(
        self,
        rows: Sequence[ExpectedRow],
        max_length: int,
        cost: CostModel,
        graph_seconds: GraphSeconds,
        count_R: np.ndarray,
        table: PrefixTable,
    ):
        self._cost, self._graph_seconds = cost, graph_seconds
        self._count_R, self._table = count_R, table
        self._prompts = np.array([row.need.prompt_length for row in rows])
        self._longest_output = max(row.output for row in rows)
        outputs = np.array([row.output for row in rows])
        self._spread = float(outputs.std() / max(1.0, outputs.mean()))
        self._may_share = table.shares or any(row.need.num_sequences > 1 for row in rows)
        """Whether rows may share pages."""
        change = np.zeros(max_length + 2)
        for row in rows:
            start = row.need.prompt_length
            change[start] += row.need.num_sequences
            change[min(start + row.output, max_length)] -= row.need.num_sequences
        self.emitted_below = np.concatenate([[0], np.cumsum(np.cumsum(change))])
        """The number of tokens that are emitted at positions below each length."""
        self._shared: dict[tuple[int, ...], np.ndarray] = {}
        """Tokens of each row in pieces of an earlier row, by chunk sizes."""
        self._known_prompts: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def candidate(self, grid: BucketGrid) -> Candidate:
        """The grid with its bound, its expected time and its padding."""
        pieces = self._pieces(grid)
        calls = _full_calls(grid, pieces)
        build, decode = self._graph_seconds.of_grid(grid), self._decode_bound(grid)
        fixed = build + self._prefill_seconds(grid, calls)
        computed = sum(n * bucket.batch * bucket.tokens for bucket, n in calls.items())
        prompts, counts = self._prefilled(grid)
        idle = idle_share(grid, pieces.every, int(counts.sum()), self._spread)
        decode_expected = decode / (1 - idle)
        return Candidate(
            grid,
            bound=fixed + decode,
            expected=fixed + decode_expected,
            padding=computed / int(prompts @ counts),
        )

    def run_seconds(self, grid: BucketGrid) -> float:
        """Minimum seconds of a run on a grid with exactly its graphs, without their build."""
        prefill = self._prefill_seconds(grid, _full_calls(grid, self._pieces(grid)))
        return prefill + self._decode_bound(grid)

    def _pieces(self, grid: BucketGrid) -> _Pieces:
        prompts, counts = self._prefilled(grid)
        every = rows_by_bucket(grid, prompts, counts)
        if not grid.chunks:
            return _Pieces(every, [0] * len(every))
        return _Pieces(every, rows_by_bucket(grid, self._saved_by(grid.chunks)))

    def _prefill_seconds(self, grid: BucketGrid, calls: Mapping[PrefillBucket, int]) -> float:
        """Seconds of these numbers of prefill calls, first calls included."""
        seconds, first_call = self._cost.seconds, self._cost.first_call_seconds
        entries = self._entries_of_prefill(grid)
        shapes = (
            (n, bucket.call() if e is None else grid.prefill_call(bucket, entries=e / n))
            for (bucket, n), e in zip(calls.items(), entries, strict=True)
            if n
        )
        return sum(n * seconds(call) + first_call(call) for n, call in shapes)

    def _entries_of_prefill(self, grid: BucketGrid) -> Sequence[float | None]:
        """The entries that all calls of each bucket read at least; None for whole prompts."""
        if not grid.chunks:
            return [None] * len(grid.prefill)
        every = entries_by_bucket(grid, *self._prefilled(grid))
        shared = entries_by_bucket(grid, self._saved_by(grid.chunks))
        return [float(entries) for entries in every - shared]

    def _prefilled(self, grid: BucketGrid) -> tuple[np.ndarray, np.ndarray]:
        """Lengths of prefills, and the number of prefills of each length.

        A prompt is prefilled once, or several times if it has more sequences than there are slots.
        """
        slots = grid.decode_slots
        if slots not in self._known_prompts:
            times = -(-self._count_R // max(1, slots))
            counts = np.bincount(self._prompts, times).astype(int)
            lengths = np.flatnonzero(counts)
            self._known_prompts[slots] = lengths, counts[lengths]
        return self._known_prompts[slots]

    def _saved_by(self, chunks: tuple[int, ...]) -> np.ndarray:
        """The tokens of each row in pieces of the row before it."""
        if chunks not in self._shared:
            self._shared[chunks] = self._table.shared_pieces(self._prompts, chunks)
        return self._shared[chunks]

    def _decode_bound(self, grid: BucketGrid) -> float:
        """Minimum seconds of decode, with all slots busy or as long as the longest output lasts."""
        if not grid.decode_slots:
            return 0.0
        assert grid.page is not None and grid.pages is not None
        emitted_at = np.diff(self.emitted_below[: grid.max_length + 1])
        # the step that emits a token at a position reads the entries up to this one
        entries = float(emitted_at @ grid.whole_pages(np.arange(1, len(emitted_at) + 1)))
        if not entries:
            return 0.0
        steps = max(float(emitted_at.sum()) / grid.decode_slots, self._longest_output)
        if not self._may_share:
            steps = max(steps, entries / (grid.pages * grid.page))
        step = grid.average_step(entries / steps)
        of_call = self._cost.decode_call_seconds() / grid.steps_per_call
        seconds = steps * (of_call + self._cost.seconds(step))
        return seconds + self._cost.first_call_seconds(step)


def rows_by_bucket(
    grid: BucketGrid, prompts: np.ndarray, counts: np.ndarray | int = 1
) -> list[int]:
    """Number of prompts, or of pieces of prompts, that each bucket takes."""
    if grid.chunks:
        ranges = _ranges_by_chunk(grid, prompts)
        return [int(((end - begin) * counts).sum()) // chunk for chunk, begin, end in ranges]
    lengths = [bucket.length for bucket in grid.prefill]
    num_rows = np.zeros(len(lengths), int)
    np.add.at(num_rows, np.searchsorted(lengths, prompts), counts)
    return num_rows.tolist()


def entries_by_bucket(
    grid: BucketGrid, prompts: np.ndarray, counts: np.ndarray | int = 1
) -> np.ndarray:
    """The entries in whole pages that pieces of prompts read, by bucket of chunks."""
    entries: list[int] = []
    for chunk, begin, end in _ranges_by_chunk(grid, prompts):
        ends = chunk * np.arange(1 + end.max(initial=0) // chunk)
        read_below = np.cumsum(grid.whole_pages(ends))
        read = read_below[end // chunk] - read_below[begin // chunk]
        if chunk == grid.chunks[0]:
            # the last piece reads up to the end of the prompt alone
            read -= grid.whole_pages(end) - grid.whole_pages(prompts)
        entries.append(int((read * counts).sum()))
    return np.array(entries)


def _ranges_by_chunk(
    grid: BucketGrid, prompts: np.ndarray
) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Each chunk with the beginning and the end of its pieces of prompts.

    A chunk takes what larger chunks leave, in whole pieces.
    """
    ranges: list[tuple[int, np.ndarray, np.ndarray]] = []
    begin = np.zeros_like(prompts)
    for chunk in reversed(grid.chunks):
        end = round_up(prompts, chunk) if chunk == grid.chunks[0] else prompts // chunk * chunk
        ranges.insert(0, (chunk, begin, end))
        begin = end
    return ranges


def calls_to_fill(slots: int, prefill: Sequence[PrefillBucket]) -> int | None:
    """Calls of chunks that fill all slots with the longest prompts; None for whole prompts.

    No one waits for a first token, so no row needs to decode beside empty slots. The pieces of all
    prompts share calls.
    """
    chunks = [bucket for bucket in prefill if bucket.chunk]
    if not chunks:
        return None
    # a prompt has fewer pieces of a smaller chunk than make one piece of the next larger chunk
    lengths = [*(bucket.tokens for bucket in chunks[1:]), chunks[-1].length]
    return sum(
        -(-slots * (length // bucket.tokens) // bucket.batch)
        for bucket, length in zip(chunks, lengths, strict=True)
    )


def idle_share(
    grid: BucketGrid, num_pieces: Sequence[int], num_prompts: int, spread: float
) -> float:
    """Expected share of slots that are idle until enough rows fill a prefill call.

    With a batch of B, 0 to B - 1 pieces wait, (B - 1) / 2 on average. Those of a prompt have one
    slot. Whole prompts wait for slots, which rows of equal outputs give back at the same time.

    Args:
      grid: The grid.
      num_pieces: The number of prompts, or of pieces of prompts, in each bucket.
      num_prompts: The number of prompts.
      spread: The standard deviation of outputs as a share of their mean.
    """
    if not grid.decode_slots:
        return 0.0
    if grid.chunks:
        pieces_per_prompt = max(1.0, sum(num_pieces) / num_prompts)
        waiting = sum(bucket.batch - 1 for bucket in grid.prefill) / 2 / pieces_per_prompt
    else:
        in_calls = zip(grid.prefill, num_pieces, strict=True)
        waiting = sum(count * (bucket.batch - 1) for bucket, count in in_calls) / 2 / num_prompts
        waiting *= min(1.0, spread)
    return min(MAX_IDLE_SHARE, waiting / grid.decode_slots)
