"""Grids worth trying for a workload, each with a bound below which its run cannot come.

For every choice of slots, tokens a call and chunks, prefill lengths and spans are cut exactly
(`bucket_search`), each on its own; the bound adds up what would remain if every call were full and
every token ran over its own span. No schedule does better, so a candidate whose bound is above what
another one needs in a whole schedule cannot be the best. Nor does one compute fewer prompt tokens
than those of as many calls as its pieces fill, so a candidate that pads more than it may even then
is out, whatever its schedule.

Rows that wait for others to fill a call of chunks do so in slots that do not decode meanwhile, of
which no bound knows; nor does one know that slots of several lengths mix rows of all lengths, so
that every call reads the longest span. What is expected of a candidate counts both: it orders what
is tried, and excludes nothing.

Slots of several lengths are tried where slots that are all alike do not fit into memory, and where
every row has one of its own. Elsewhere they are left out of the family: alike slots are of like
length at any time, as the longest rows come first, and so read little, too.

Knows nothing of schedules. Every second here is a prediction.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np

from ...sharding.call import Call
from ..grids.bucket_grid import BucketGrid, PrefillBucket
from ..grids.bucket_search import cheapest_cuts
from ..grids.default_grid import SPAN_STEP, RowShape, slot_use
from ..grids.grid_defaults import GridDefaults, round_up
from ..grids.prefill_ladder import with_small_calls
from ..grids.span_slots import SlotUse, with_ragged_slots
from .compile_time import NO_TIME, GraphSeconds
from .cost import CostModel
from .graph_prices import GraphPrices
from .prefill_calls import calls_to_fill, rows_through, share_idle

SLOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKENS_PER_PREFILL = (32, 64, 128, 256, 512, 1024, 2048)
CHUNKS = (4, 8, 16, 32, 64, 128, 256, 512)
LEAST_STEP = 4
"""From one chunk of a plan to the next: one nearly as large saves little."""
SLOTS_PER_ROW = (1, 4, 16)
"""At least, of calls of chunks: the more, the sooner there are rows to fill them."""
SLOTS_PER_LONG_ROW = 8
"""The same of calls of chunks in slots that reach as far, where slots have several lengths."""


@dataclass(frozen=True)
class ExpectedRow:
    """A row of a workload, and the tokens that it is expected to emit."""

    need: RowShape
    output: int
    """Of each of its sequences, a stop id included."""
    ends_on_host: bool = False
    """Whether a stop string ends it."""

    def limit(self, max_length: int) -> int:
        """Length at which its sequences must end."""
        most = self.need.max_tokens
        return max_length if most is None else self.need.prompt_length + most


@dataclass(frozen=True)
class Budget:
    """What a plan may take."""

    prefill_graphs: int = 8
    decode_graphs: int = 4
    memory_bytes: float = math.inf
    """On each device."""
    compile_seconds: float = math.inf
    """Of all graphs together."""
    padding: float = math.inf
    """Computed over real prompt tokens, dummy rows included."""
    graph_seconds: GraphSeconds = NO_TIME
    """Predicted, of compiling one; a graph must save as much."""

    def build_seconds(self, grid: BucketGrid) -> float:
        """Predicted, of compiling all of a grid; those that give slots take next to nothing."""
        return self.graph_seconds.of(grid)

    def within(self, *, score: bool) -> "Budget":
        """Numbers of graphs that can be built in time, a third of it for decode."""
        each = self.graph_seconds
        if not (each.prefill and each.decode and math.isfinite(self.compile_seconds)):
            return self
        decode = min(self.decode_graphs, max(1, int(self.compile_seconds / 3 / each.decode)))
        left = self.compile_seconds - decode * each.decode
        prefill = min(self.prefill_graphs, max(1, int(left / each.prefill / (1 + score))))
        return replace(self, prefill_graphs=prefill, decode_graphs=decode)


def num_graphs(grid: BucketGrid) -> int:
    """Prefill and decode graphs of a grid."""
    return len(grid.prefill) * len(grid.prefill_kinds) + len(grid.graph_spans)


@dataclass(frozen=True)
class Candidate:
    """A grid, and the seconds of building and running below which no schedule of it comes."""

    grid: BucketGrid
    bound: float
    expected: float
    """Seconds that it may well take: by these candidates are tried."""
    padding: float
    """Computed over real prompt tokens at least."""


def _expected_use(rows: Sequence[ExpectedRow], *, has_chunks: bool) -> SlotUse:
    # a row of which nothing is expected is one that is only read
    needs = [row.need if row.output else replace(row.need, max_tokens=0) for row in rows]
    use = slot_use(needs, has_chunks=has_chunks)
    return replace(use, output_R=np.array([row.output for row in rows], int))


class CandidateGrids:
    """Every grid of a family, for one workload."""

    def __init__(
        self,
        rows: Sequence[ExpectedRow],
        max_position: int,
        cost: CostModel,
        budget: Budget,
        defaults: GridDefaults,
    ):
        if not rows:
            raise ValueError("workload: expected at least one row that fits the model, got none.")
        self._rows, self._cost, self._defaults = rows, cost, defaults
        self._score = any(row.need.is_scored for row in rows)
        self._only_scores = all(row.need.is_only_scored for row in rows)
        self._budget = budget.within(score=self._score)
        self._prices = GraphPrices(cost, budget.graph_seconds)
        longest = max(row.need.prompt_length + max(row.output, 1) for row in rows)
        declared = max(row.limit(0) for row in rows)
        asked = defaults.max_length or 0
        wanted = min(round_up(max(longest, declared, asked), defaults.length_step), max_position)
        self.max_length = defaults.longest_span(wanted)
        """Of prompt and output together, in grids of whole prompts."""
        longest_prompt = max(row.need.prompt_length for row in rows)
        if longest_prompt > (most := defaults.longest_prefill(self.max_length)):
            raise ValueError(
                f"prompts: expected at most {most} tokens, the longest prefill that the layout "
                f"divides and the model allows, got {longest_prompt}."
            )
        self._longest_span = defaults.longest_span(max_position)
        self._prompts = np.array([row.need.prompt_length for row in rows])
        self._longest_output = max(row.output for row in rows)
        self._slot_use = {
            chunks: _expected_use(rows, has_chunks=chunks) for chunks in (False, True)
        }
        self._emitted_below = self._count_emitted()
        """By length: tokens that are emitted into positions below it."""
        self._cuts: dict[int, list[PrefillBucket]] = {}
        self._known_prompts: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._known_spans: dict[tuple[int, int, int, int], tuple[int, ...]] = {}

    def __iter__(self) -> Iterator[Candidate]:
        """Those within the budget, in no order."""
        yield from self.of_whole_prompts()
        yield from self.of_chunks()

    def of_whole_prompts(self) -> Iterator[Candidate]:
        """Those that run prompts whole."""
        step = math.lcm(SPAN_STEP, self._defaults.span_multiple)
        return self._within_budget(
            self._grid(slots, self.prefill_of(tokens, slots), spans)
            for slots in self._slot_counts(has_chunks=False)
            for spans in [self._spans(slots, step, self.max_length, self._budget.decode_graphs)]
            for tokens in TOKENS_PER_PREFILL
        )

    def of_chunks(self) -> Iterator[Candidate]:
        """Grids that prefill prompts in chunks of one size or two."""
        pairs = ((a, b) for a, b in combinations(CHUNKS, 2) if b >= LEAST_STEP * a)
        sizes = [*((chunk,) for chunk in CHUNKS), *pairs]
        choices = product(
            self._slot_counts(has_chunks=True), TOKENS_PER_PREFILL, SLOTS_PER_ROW, sizes
        )
        found = (self._chunked(*choice) for choice in choices)
        return self._within_budget(grid for grid in found if grid is not None)

    @property
    def least_bytes(self) -> int:
        """Of weights and the smallest cache, on each device."""
        work, slots = self._cost.work, 0 if self._only_scores else self._defaults.slot_multiple
        return work.parameter_bytes + work.cache_bytes(slots, self.max_length)

    def _within_budget(self, found: Iterable[BucketGrid]) -> Iterator[Candidate]:
        known: set[BucketGrid] = set()
        for grid in dict.fromkeys(found):
            if self._budget.build_seconds(grid) > self._budget.compile_seconds:
                continue
            choices = [grid]
            if self._is_small(grid) or not self._fits_memory(grid):
                choices.append(self._ragged(grid))
            for choice in choices:
                if choice not in known and self._fits_memory(choice):
                    known.add(choice)
                    yield self._weighed(choice)

    def _fits_memory(self, grid: BucketGrid) -> bool:
        work = self._cost.work
        return work.parameter_bytes + work.grid_bytes(grid) <= self._budget.memory_bytes

    def _is_small(self, grid: BucketGrid) -> bool:
        """Whether every row has a slot of its own, so that long rows make nothing wait."""
        return self._slot_use[bool(grid.chunks)].num_sequences <= grid.decode_slots

    def _ragged(self, grid: BucketGrid) -> BucketGrid:
        """The grid with slots that end where most rows do, if that saves much.

        Where rows wait for slots, chunks in few long ones come in small calls: large ones would
        wait long to be full.
        """
        ragged = with_ragged_slots(grid, self._slot_use[bool(grid.chunks)], self._cost.work.layout)
        if ragged.span_slots is None or not ragged.chunks or self._is_small(grid):
            return ragged
        most_rows = {
            span: round_up(-(-slots // SLOTS_PER_LONG_ROW), self._defaults.batch_multiple)
            for span, slots in zip(ragged.decode_spans, ragged.span_slots, strict=True)
        }
        prefill = [
            bucket._replace(batch=min(bucket.batch, most_rows[bucket.length]))
            for bucket in ragged.prefill
        ]
        return replace(
            ragged,
            prefill=tuple(prefill),
            chunks_per_decode=calls_to_fill(ragged.decode_slots, prefill),
        )

    def prefill_of(self, tokens: int, slots: int) -> tuple[PrefillBucket, ...]:
        """The best prefill lengths for calls of so many tokens, in calls that suit the slots."""
        num_sequences = self._slot_use[False].num_sequences
        return with_small_calls(self._cut(tokens), slots, num_sequences, self._defaults)

    def bound(self, grid: BucketGrid) -> float:
        """Seconds below which no schedule over a grid comes, its build included."""
        return self._weighed(grid).bound

    def _weighed(self, grid: BucketGrid) -> Candidate:
        prompts, counts = self._prefilled(grid)
        rows = zip(grid.prefill, rows_through(grid, prompts, counts), strict=True)
        calls = {bucket: -(-count // bucket.batch) for bucket, count in rows}
        prefill = sum(n * self._cost.seconds(bucket.call()) for bucket, n in calls.items())
        first = self._cost.first_call_seconds
        prefill += sum(first(bucket.call()) for bucket, n in calls.items() if n)
        build, decode = self._least_decode(grid)
        before = build + prefill
        computed = sum(n * bucket.batch * bucket.tokens for bucket, n in calls.items())
        return Candidate(
            grid,
            bound=before + decode,
            expected=before + max(decode, self._decode_mixed(grid)) / (1 - share_idle(grid)),
            padding=computed / int(prompts @ counts),
        )

    def _least_decode(self, grid: BucketGrid) -> tuple[float, float]:
        """Seconds of building, and of decode at least, of the graphs of which they add up to least.

        The cuts of the cache stay where they are, whichever spans have graphs.
        """
        *spans, last = grid.decode_spans or (grid.max_length,)
        chosen = (kept for size in range(len(spans) + 1) for kept in combinations(spans, size))
        choices = (replace(grid, decode_graphs=(*kept, last)) for kept in chosen)
        found = (
            (self._budget.build_seconds(one), self._decode_bound(one))
            for one in (choices if grid.decode_spans else [grid])
        )
        return min(found, key=sum)

    def _prefilled(self, grid: BucketGrid) -> tuple[np.ndarray, np.ndarray]:
        """The lengths of prefills, and the number of prefills of each length.

        A prompt is prefilled once for each set of slots it needs.
        """
        slots = grid.decode_slots
        if slots not in self._known_prompts:
            times = -(-self._slot_use[True].count_R // max(1, slots))
            counts = np.bincount(self._prompts, times).astype(int)
            lengths = np.flatnonzero(counts)
            self._known_prompts[slots] = lengths, counts[lengths]
        return self._known_prompts[slots]

    def _count_emitted(self) -> np.ndarray:
        change = np.zeros(self.max_length + max(CHUNKS) + 2)
        for row in self._rows:
            start = row.need.prompt_length
            end = min(start + row.output, self.max_length)
            change[start] += row.need.num_sequences
            change[end] -= row.need.num_sequences
        return np.concatenate([[0], np.cumsum(np.cumsum(change))])

    def _slot_counts(self, *, has_chunks: bool) -> list[int]:
        if self._only_scores and not has_chunks:
            return [0]
        most, multiple = self._slot_use[has_chunks].num_sequences, self._defaults.slot_multiple
        return sorted({round_up(min(slots, max(most, 1)), multiple) for slots in SLOTS})

    def _cut(self, tokens: int) -> list[PrefillBucket]:
        """Prefill buckets of least cost for calls of up to so many tokens, or of one row."""
        if tokens not in self._cuts:
            defaults = replace(
                self._defaults,
                tokens_per_prefill=tokens * self._defaults.batch_multiple,
                max_prefill_graphs=self._budget.prefill_graphs,
            )
            num_kinds = (not self._only_scores) + self._score
            self._cuts[tokens] = self._prices.prefill(
                num_kinds, self._prompts, self.max_length, defaults
            )
        return self._cuts[tokens]

    def _chunked(
        self, slots: int, tokens: int, slots_per_row: int, chunks: tuple[int, ...]
    ) -> BucketGrid | None:
        defaults, most_rows = self._defaults, max(1, slots // slots_per_row)
        rows = (max(1, min(tokens // chunk, most_rows)) for chunk in chunks)
        batches = [round_up(count, defaults.batch_multiple) for count in rows]
        # chunks lie in one segment of the cache: as far as prompts go, spans are multiples of them
        longest = min(round_up(self.max_length, chunks[-1]), self._longest_span)
        whole = longest // chunks[-1] * chunks[-1]
        needed = int(round_up(self._prompts.max(), chunks[0]))
        most_spans = min(self._budget.decode_graphs, self._budget.prefill_graphs // len(chunks))
        fits = max(batches) <= slots and needed <= whole and most_spans
        if chunks[0] % defaults.length_multiple or not fits:
            return None
        step = math.lcm(SPAN_STEP, chunks[-1], defaults.span_multiple)
        spans = self._spans(slots, step, longest, most_spans)
        cuts = sorted({*(span for span in spans if not span % chunks[-1]), whole})
        last = next(i for i, span in enumerate(cuts) if needed <= span)
        shapes = product(cuts[: last + 1], zip(batches, chunks, strict=True))
        prefill = [PrefillBucket(span, *shape) for span, shape in shapes]
        return self._grid(slots, prefill, tuple(sorted({*cuts, longest})))

    def _grid(
        self,
        slots: int,
        prefill: Sequence[PrefillBucket],
        spans: tuple[int, ...],
    ) -> BucketGrid:
        return BucketGrid(
            max_length=spans[-1] if spans else self.max_length,
            prefill=tuple(prefill),
            decode_slots=slots,
            decode_spans=spans,
            steps_per_call=self._defaults.steps_per_call,
            score=self._score,
            chunks_per_decode=calls_to_fill(slots, prefill),
        )

    def _spans(self, slots: int, step: int, longest: int, most: int) -> tuple[int, ...]:
        """At most so many spans of least cost, if every token ran over its own."""
        if not slots:
            return ()
        choice = (slots, step, longest, most)
        if (known := self._known_spans.get(choice)) is not None:
            return known
        borders = np.append(np.arange(step, longest, step), longest)
        tokens_below = self._emitted_below[[0, *borders]]

        def costs(end: int) -> np.ndarray:
            span = int(borders[end])
            seconds = self._cost.seconds(Call.of_step(slots, span)) / slots
            tokens = tokens_below[end + 1] - tokens_below[: end + 1]
            return tokens * seconds + self._prices.of_decode(slots, span)

        ends = cheapest_cuts(costs, len(borders), most)
        return self._known_spans.setdefault(choice, tuple(int(borders[end]) for end in ends))

    def _decode_bound(self, grid: BucketGrid) -> float:
        """Every slot busy; and no less than the row that takes longest on its own.

        Tokens beyond a span come from slots that reach beyond it, one a slot and step, in steps
        that read beyond it, and as far as the next span with a graph.
        """
        if not grid.decode_slots:
            return 0.0
        of_step = [
            self._cost.seconds(grid.decode_call(grid.span_of(span))) for span in grid.decode_spans
        ]
        starts = [0, *grid.decode_spans[:-1]]
        beyond = self._emitted_below[grid.max_length] - self._emitted_below[starts]
        slots = grid.span_slots or (grid.decode_slots,) * len(starts)
        steps = np.maximum.accumulate((beyond / slots)[::-1])[::-1]
        shared = float(steps @ np.diff([0, *of_step]))
        first = self._cost.first_call_seconds(grid.decode_call(grid.max_length))
        return max(shared, self._longest_output * min(of_step)) + first * bool(shared)

    def _decode_mixed(self, grid: BucketGrid) -> float:
        """Every slot busy, and a long row among them at any time; 0 where slots are all alike.

        Those are given rows of like length, the longest first.
        """
        if grid.span_slots is None:
            return 0.0
        of_step = self._cost.seconds(grid.decode_call(grid.max_length))
        return float(self._emitted_below[grid.max_length]) * of_step / grid.decode_slots
