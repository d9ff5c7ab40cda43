"""Candidate grids for a workload, each with a lower bound of its time.

For every choice of slots, tokens per call and chunks, prefill lengths and spans are cut exactly
(`bucket_search`), independently of each other. The bounds are those of `run_bounds`.

Slots of several lengths are tried in two cases: slots of one length do not fit into memory, or
every row has a slot of its own. Otherwise they are not needed: with slots of one length the longest
rows come first, so rows of similar length run at the same time, and decode reads little, too.

With pages, rows take what memory beside the weights holds, and every span is the whole length. A
prompt is whole, or in chunks of one small size that fill packed calls (tiles).

Knows nothing of schedules. Every time here is a prediction.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product

import numpy as np

from ...sharding.call import Call
from ..graphs.graph_kinds import kinds_of
from ..grids.bucket_grid import BucketGrid
from ..grids.bucket_search import cheapest_cuts
from ..grids.default_grid import SPAN_STEP, slot_use
from ..grids.grid_defaults import GridDefaults, round_up
from ..grids.prefill_bucket import PrefillBucket
from ..grids.prefill_ladder import with_small_calls
from ..grids.prefix_table import NOTHING_SHARED, PrefixTable
from ..grids.span_slots import SlotUse, with_ragged_slots
from .compile_time import NO_TIME, GraphSeconds
from .cost import CostModel
from .graph_prices import GraphPrices
from .page_choice import pages_in_memory
from .run_bounds import Candidate, ExpectedRow, RunBounds, calls_to_fill

SLOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKENS_PER_PREFILL = (32, 64, 128, 256, 512, 1024, 2048)
CHUNKS = (4, 8, 16, 32, 64, 128, 256, 512)
MIN_CHUNK_RATIO = 4
"""Minimum ratio of two chunk sizes of a plan: a second chunk of nearly the same size saves little.
"""
SLOTS_PER_ROW = (1, 4, 16)
"""Minimum numbers of slots per row of a call of chunks: with more slots, calls fill sooner."""
TILES = (16, 32, 64)
"""Chunk sizes of packed calls."""
TILE_QUERIES = 64
"""Minimum number of queries of a tile for each head of keys on an accelerator, whose products have
as many rows. Grouped heads have several queries for each token."""
TOKENS_PER_PACKED = (512, 1024, 2048, 4096)
"""Tokens of packed calls on an accelerator. Longer prompts leave no rows empty, so calls of these
sizes fill soon."""
SLOTS_PER_LONG_ROW = 8
"""Minimum number of slots that hold rows of a span, for each row of a call of chunks of the span.

It is used if slots have several lengths.
"""


@dataclass(frozen=True)
class Budget:
    """Limits of a plan."""

    prefill_graphs: int = 8
    decode_graphs: int = 4
    memory_bytes: float = math.inf
    """Memory of each device."""
    compile_seconds: float = math.inf
    """Maximum time to compile all graphs."""
    padding: float = math.inf
    """Maximum ratio of computed to real prompt tokens, dummy rows included."""
    graph_seconds: GraphSeconds = NO_TIME
    """Predicted time to compile a graph; each graph must save at least this time."""

    def build_seconds(self, grid: BucketGrid) -> float:
        """Predicted seconds to compile all graphs of a grid, without the small graphs of slots."""
        return self.graph_seconds.of_grid(grid)

    def with_affordable_graphs(self, *, score: bool) -> "Budget":
        """The same budget with numbers of graphs that compile in time, a third of it for decode."""
        each = self.graph_seconds
        if not (each.prefill and each.decode and math.isfinite(self.compile_seconds)):
            return self
        decode = min(self.decode_graphs, max(1, int(self.compile_seconds / 3 / each.decode)))
        left = self.compile_seconds - decode * each.decode
        prefill = min(self.prefill_graphs, max(1, int(left / each.prefill / (1 + score))))
        return replace(self, prefill_graphs=prefill, decode_graphs=decode)


def num_graphs(grid: BucketGrid) -> int:
    """Number of prefill and decode graphs of a grid."""
    return len(grid.prefill) * len(kinds_of(grid, PrefillBucket)) + len(grid.graph_spans)


def _expected_use(rows: Sequence[ExpectedRow], *, has_chunks: bool) -> SlotUse:
    # a row without expected output is only read
    needs = [row.need if row.output else replace(row.need, max_tokens=0) for row in rows]
    use = slot_use(needs, has_chunks=has_chunks)
    return replace(use, output_R=np.array([row.output for row in rows], int))


class CandidateGrids:
    """The candidate grids of one workload."""

    def __init__(
        self,
        rows: Sequence[ExpectedRow],
        max_position: int,
        cost: CostModel,
        budget: Budget,
        defaults: GridDefaults,
        table: PrefixTable = NOTHING_SHARED,
    ):
        """Prepare the candidates."""
        if not rows:
            raise ValueError("workload: expected at least one row that fits the model, got none.")
        self._rows, self._cost, self._defaults = rows, cost, defaults
        self._max_position = max_position
        self._score = any(row.need.is_scored for row in rows)
        self._only_scores = all(row.need.is_only_scored for row in rows)
        self._budget = budget.with_affordable_graphs(score=self._score)
        self._prices = GraphPrices(cost, budget.graph_seconds)
        longest = max(row.need.prompt_length + max(row.output, 1) for row in rows)
        declared = max(row.limit(0) for row in rows)
        asked = defaults.max_length or 0
        wanted = min(round_up(max(longest, declared, asked), defaults.row_step), max_position)
        self.max_length = defaults.longest_span(wanted)
        """Maximum total length of rows in grids of whole prompts."""
        longest_prompt = max(row.need.prompt_length for row in rows)
        if longest_prompt > (max_prompt := defaults.longest_prefill(self.max_length)):
            raise ValueError(
                f"prompts: expected at most {max_prompt} tokens, the longest prefill that the "
                f"layout divides and the model allows, got {longest_prompt}."
            )
        self._longest_span = defaults.longest_span(max_position)
        self._prompts = np.array([row.need.prompt_length for row in rows])
        self._slot_use = {
            chunks: _expected_use(rows, has_chunks=chunks) for chunks in (False, True)
        }
        self._cuts: dict[int, list[PrefillBucket]] = {}
        self._bounds = RunBounds(
            rows,
            self.max_length,
            self.max_length + max(CHUNKS),
            cost,
            budget.graph_seconds,
            self._slot_use[True].count_R,
            table,
        )
        self._known_spans: dict[tuple[int, int, int, int], tuple[int, ...]] = {}

    def __iter__(self) -> Iterator[Candidate]:
        """Candidates within the budget, in no order."""
        yield from self.whole_prompt_candidates()
        yield from self.chunk_candidates()

    def whole_prompt_candidates(self) -> Iterator[Candidate]:
        """Candidates that prefill whole prompts."""
        step = math.lcm(SPAN_STEP, self._defaults.span_multiple)
        grids = (
            self._grid(slots, self.prefill_buckets(tokens, slots), spans)
            for slots in self._slot_counts(has_chunks=False)
            for spans in [self._spans(slots, step, self.max_length, self._budget.decode_graphs)]
            for tokens in TOKENS_PER_PREFILL
        )
        return self._within_budget(grid for grid in grids if grid is not None)

    def chunk_candidates(self) -> Iterator[Candidate]:
        """Candidates that prefill prompts in chunks of one size or two sizes; of one with pages."""
        if self._defaults.page is not None:
            return self._packed_candidates()
        pairs = ((a, b) for a, b in combinations(CHUNKS, 2) if b >= MIN_CHUNK_RATIO * a)
        sizes = [*((chunk,) for chunk in CHUNKS), *pairs]
        choices = product(
            self._slot_counts(has_chunks=True), TOKENS_PER_PREFILL, SLOTS_PER_ROW, sizes
        )
        grids = (self._chunked(*choice) for choice in choices)
        return self._within_budget(grid for grid in grids if grid is not None)

    def _packed_candidates(self) -> Iterator[Candidate]:
        """Candidates with pages that prefill prompts in tiles."""
        is_cpu = self._cost.hardware.name == "cpu"
        # all heads of latent attention share the latents
        group = min(
            attention.num_query_heads if attention.latent else attention.heads_per_kv
            for attention in self._cost.work.config.attention_kinds
        )
        tiles = [
            tile
            for tile in TILES
            if (is_cpu or tile * group >= TILE_QUERIES)
            and not tile % self._defaults.length_multiple
            # entries are split as the tokens of a tile are
            and not tile % self._defaults.span_multiple
        ]
        calls = TOKENS_PER_PREFILL if is_cpu else TOKENS_PER_PACKED
        choices = product(self._slot_counts(has_chunks=True), calls, tiles)
        grids = (self._packed(*choice) for choice in choices)
        return self._within_budget(grid for grid in grids if grid is not None)

    @property
    def min_bytes(self) -> int:
        """Bytes of the weights and the smallest cache on each device."""
        work, slots = self._cost.work, 0 if self._only_scores else self._defaults.slot_multiple
        if slots and (page := self._defaults.page) is not None:
            return work.parameter_bytes + work.page_bytes(round_up(self.max_length, page))
        return work.parameter_bytes + work.cache_bytes(slots, self.max_length)

    def _within_budget(self, grids: Iterable[BucketGrid]) -> Iterator[Candidate]:
        known: set[BucketGrid] = set()
        for grid in dict.fromkeys(grids):
            if self._budget.build_seconds(grid) > self._budget.compile_seconds:
                continue
            choices = [grid]
            if self._is_small(grid) or not self._fits_memory(grid):
                choices.append(self._ragged(grid))
            for choice in choices:
                if choice not in known and self._fits_memory(choice):
                    known.add(choice)
                    yield self._bounds.candidate(choice)

    def _fits_memory(self, grid: BucketGrid) -> bool:
        work = self._cost.work
        return work.parameter_bytes + work.grid_bytes(grid) <= self._budget.memory_bytes

    def _is_small(self, grid: BucketGrid) -> bool:
        """Whether every row has a slot of its own, so that no row waits for a long one."""
        return self._slot_use[bool(grid.chunks)].num_sequences <= grid.decode_slots

    def _ragged(self, grid: BucketGrid) -> BucketGrid:
        """The grid with slots of several lengths, if that saves much.

        If rows wait for slots, calls of chunks in the few long slots are small, because large calls
        would take long to fill.
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

    def prefill_buckets(self, tokens: int, slots: int) -> tuple[PrefillBucket, ...]:
        """The cheapest prefill lengths for calls of `tokens` tokens that suit the slots."""
        num_sequences = self._slot_use[False].num_sequences
        return with_small_calls(self._cut(tokens), slots, num_sequences, self._defaults)

    def run_seconds(self, grid: BucketGrid) -> float:
        """Minimum seconds of a run on a grid, without its build and planned prefixes."""
        return self._bounds.run_seconds(grid)

    def _slot_counts(self, *, has_chunks: bool) -> list[int]:
        if self._only_scores and not has_chunks:
            return [0]
        num_sequences, multiple = (
            self._slot_use[has_chunks].num_sequences,
            self._defaults.slot_multiple,
        )
        sizes = {-(-min(slots, max(num_sequences, 1)) // multiple) for slots in SLOTS}
        return sorted(multiple * size for size in sizes)

    def _cut(self, tokens: int) -> list[PrefillBucket]:
        """Prefill buckets of least cost for calls of up to `tokens` tokens, or of one row."""
        if tokens not in self._cuts:
            defaults = replace(
                self._defaults,
                tokens_per_prefill=tokens * self._defaults.batch_multiple,
                max_prefill_graphs=self._budget.prefill_graphs,
            )
            num_kinds = (not self._only_scores) + self._score
            self._cuts[tokens] = self._prices.cheapest_prefill(
                num_kinds, self._prompts, self.max_length, defaults
            )
        return self._cuts[tokens]

    def _chunked(
        self, slots: int, tokens: int, slots_per_row: int, chunks: tuple[int, ...]
    ) -> BucketGrid | None:
        defaults, most_rows = self._defaults, max(1, slots // slots_per_row)
        rows = (max(1, min(tokens // chunk, most_rows)) for chunk in chunks)
        batches = [round_up(count, defaults.batch_multiple) for count in rows]
        # a chunk lies in one segment of the cache, so the spans up to the longest prompt are
        # multiples of chunks
        longest = min(round_up(self.max_length, chunks[-1]), self._longest_span)
        whole = longest // chunks[-1] * chunks[-1]
        needed = int(self._prompts.max())
        max_spans = min(self._budget.decode_graphs, self._budget.prefill_graphs // len(chunks))
        fits = max(batches) <= slots and needed <= whole and max_spans
        if chunks[0] % defaults.length_multiple or not fits:
            return None
        step = math.lcm(SPAN_STEP, chunks[-1], defaults.span_multiple)
        spans = self._spans(slots, step, longest, max_spans)
        cuts = sorted({*(span for span in spans if not span % chunks[-1]), whole})
        last = next(i for i, span in enumerate(cuts) if needed <= span)
        shapes = product(cuts[: last + 1], zip(batches, chunks, strict=True))
        prefill = [PrefillBucket(span, *shape) for span, shape in shapes]
        return self._grid(slots, prefill, tuple(sorted({*cuts, longest})))

    def _packed(self, slots: int, tokens: int, tile: int) -> BucketGrid | None:
        """The grid of packed calls; None if it has no room for a tile or for the pages of a row."""
        # before it has pages, a grid has a span of whole chunks
        if not (whole := self.max_length // tile * tile):
            return None
        most_pieces = slots * -(-int(self._prompts.max()) // tile)
        multiple = self._defaults.batch_multiple
        batch = round_up(max(1, min(multiple * tokens // tile, most_pieces)), multiple)
        prefill = [PrefillBucket(whole, batch, tile)]
        return self._grid(slots, prefill, tuple(sorted({whole, self.max_length})))

    def _grid(
        self,
        slots: int,
        prefill: Sequence[PrefillBucket],
        spans: tuple[int, ...],
    ) -> BucketGrid | None:
        """The grid of these graphs; None if its pages have no room for a row of its length."""
        grid = BucketGrid(
            max_length=spans[-1] if spans else self.max_length,
            prefill=tuple(prefill),
            decode_slots=slots,
            decode_spans=spans,
            steps_per_call=self._defaults.steps_per_call,
            score=self._score,
            chunks_per_decode=calls_to_fill(
                slots, prefill, is_packed=self._defaults.page is not None
            ),
        )
        if not slots or (page := self._defaults.page) is None:
            return grid
        work, use = self._cost.work, self._slot_use[bool(grid.chunks)]
        max_bytes = self._budget.memory_bytes - work.parameter_bytes
        return pages_in_memory(grid, use, page, self._defaults.slot_groups, work, max_bytes)

    def _spans(self, slots: int, step: int, longest: int, max_spans: int) -> tuple[int, ...]:
        """At most `max_spans` spans of least cost, if a token's step read only the token's span."""
        if not slots:
            return ()
        choice = (slots, step, longest, max_spans)
        if (known := self._known_spans.get(choice)) is not None:
            return known
        borders = np.append(np.arange(step, longest, step), longest)
        tokens_below = self._bounds.emitted_below[[0, *borders]]

        def costs(end: int) -> np.ndarray:
            span = int(borders[end])
            seconds = self._cost.seconds(Call.of_step(slots, span)) / slots
            tokens = tokens_below[end + 1] - tokens_below[: end + 1]
            return tokens * seconds + self._prices.of_decode_graph(slots, span)

        ends = cheapest_cuts(costs, len(borders), max_spans)
        return self._known_spans.setdefault(choice, tuple(int(borders[end]) for end in ends))
