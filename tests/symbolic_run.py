"""Runs of the scheduler whose slots hold tokens instead of keys, for tests without a device."""

from collections import deque

import numpy as np
from related_prompts import related_prompts, table_of

from noria.compile.grids.bucket_grid import BucketGrid
from noria.runtime.engine.actions import (
    DecodeAction,
    ForkAction,
    PrefillAction,
    ScheduledRequest,
)
from noria.runtime.engine.scheduler import Scheduler
from noria.runtime.engine.shared_prefixes import plan_submission


def random_grid(rng: np.random.Generator) -> BucketGrid:
    """Return a grid of chunks."""
    chunks = [(16,), (32,), (16, 64)][rng.integers(3)]
    slots = int(rng.choice([2, 8, 16, 40]))
    batches = rng.choice([1, 2, 4], len(chunks)).tolist()
    table = {
        "max_length": 256,
        "prefill": [[256, *batches]],
        "decode_slots": slots,
        "page": 32,
        "chunk": list(chunks),
    }
    return BucketGrid.from_table(table)


class SymbolicRun:
    """A job whose slots hold the tokens that were written to them, and the graphs that wrote them.

    Every step is checked. Rows are submitted in the order of a job, or at random.
    """

    def __init__(
        self,
        seed: int,
        *,
        grid: BucketGrid | None = None,
        prompts: list[list[int]] | None = None,
        num_samples: list[int] | None = None,
        in_order: bool = True,
        drain_at: int | None = None,
    ):
        rng = np.random.default_rng(seed)
        self.grid, self.prompts = grid or random_grid(rng), prompts or related_prompts(seed)
        count = len(self.prompts)
        self.outputs = rng.integers(1, 30, count).tolist()
        self.num_samples = num_samples or [1] * count
        if prompts is None:
            self.num_samples = rng.choice([1, 1, 3, self.grid.decode_slots], count).tolist()
        lengths = [(len(p), n) for p, n in zip(self.prompts, self.outputs, strict=True)]
        self.table, _ = table_of(self.prompts)
        submission = self.submission = plan_submission(lengths, self.table, self.grid)
        rows = list(zip(submission.rows, submission.prefixes, strict=True))
        if not in_order:
            rows = [rows[i] for i in rng.permutation(count)]
        self.scheduler = Scheduler(self.grid)
        self.scheduler.reserve(submission.num_held)
        self.waiting = deque(enumerate(rows))
        self.row_of: dict[int, int] = {}
        self.content: dict[int, tuple] = {}
        self.live: dict[int, list] = {}
        self.done: dict[tuple[int, int], None] = {}
        self.dropped: set[int] = set()
        self.num_computed = self.num_calls = self.num_pieces = self.num_steps = 0
        self._run(drain_at)

    def _run(self, drain_at: int | None) -> None:
        for self.num_steps in range(100_000):
            while self.waiting and self.scheduler.wants_more:
                number, (row, prefix) = self.waiting.popleft()
                self.row_of[number] = row
                length, samples = len(self.prompts[row]), self.num_samples[row]
                limit = length + self.outputs[row]
                self.scheduler.submit(
                    ScheduledRequest(number, length, limit, samples, False, prefix)
                )
            if self.num_steps == drain_at:
                self.dropped = {request.number for request in self.scheduler.drain()}
                self.waiting.clear()
            match self.scheduler.next_action():
                case PrefillAction() as action:
                    self._prefill(action)
                case ForkAction(source=source, slot=slot, sequence=sequence):
                    assert slot not in self.live
                    self.content[slot] = self.content[source]
                    if sequence is not None:
                        self.live[slot] = [sequence, 0]
                case DecodeAction(slots=slots):
                    self._decode(slots)
                case None:
                    return
        raise AssertionError("the job does not end")

    def _prefill(self, action: PrefillAction) -> None:
        self.num_calls += 1
        self.num_pieces += len(action.rows)
        for piece in action.rows:
            number, end = piece.sequence.request.number, piece.start + piece.count
            assert piece.slot not in self.live
            assert number not in self.dropped
            prompt = self.prompts[self.row_of[number]]
            tokens, graphs = self.content[piece.slot] if piece.start else ((), ())
            assert tokens == tuple(prompt[: piece.start])
            self.content[piece.slot] = tuple(prompt[:end]), (*graphs, action.bucket)
            assert end <= self.grid.max_length
            self.num_computed += piece.count
            if piece.is_last and not piece.is_of_prefix:
                assert list(self.content[piece.slot][1]) == self.grid.buckets_of(len(prompt))
                self.live[piece.slot] = [piece.sequence, 0]

    def _decode(self, slots: tuple[int, ...]) -> None:
        assert set(slots) == set(self.live)
        for slot in slots:
            sequence, emitted = self.live[slot]
            assert sequence.request.number not in self.dropped
            wanted = self.outputs[self.row_of[sequence.request.number]]
            if emitted + 8 < wanted:
                self.scheduler.slots.advance(slot, 8)
                self.live[slot][1] += 8
                continue
            self.scheduler.slots.release(slot)
            del self.live[slot]
            key = sequence.request.number, sequence.sample
            assert key not in self.done
            self.done[key] = None

    def assert_all_rows_ended(self) -> None:
        kept = self.row_of.keys() - self.dropped
        expected = {(n, i) for n in kept for i in range(self.num_samples[self.row_of[n]])}
        assert {key for key in self.done if key[0] in kept} == expected
