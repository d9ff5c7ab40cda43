"""Candidate grids for a workload, each with a lower bound of its time.

For every choice of slots, tokens per call and chunks, prefill lengths are cut exactly
(`bucket_search`). The bounds are those of `run_bounds`.

Rows take what pages memory beside the weights holds. A prompt is whole, or in chunks of one small
size that fill packed calls (tiles).

Knows nothing of schedules. Every time here is a prediction.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from ...modelzoo.errors import UserError
from ..grids.bucket_grid import BucketGrid
from ..grids.default_grid import grid_of
from ..grids.grid_defaults import GridDefaults, round_up
from ..grids.page_count import with_needed_pages
from ..grids.prefill_bucket import PrefillBucket
from ..grids.prefill_ladder import with_small_calls
from ..grids.prefix_table import NOTHING_SHARED, PrefixTable
from ..grids.slot_use import SlotUse
from .compile_time import NO_TIME, GraphSeconds
from .cost import CostModel
from .graph_prices import GraphPrices
from .page_choice import pages_in_memory
from .run_bounds import Candidate, ExpectedRow, RunBounds, calls_to_fill
from .work import Work

SLOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKENS_PER_PREFILL = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Tokens of a call of whole prompts; a layout that splits rows has as many in each piece."""
MAX_TOKENS_TO_CUT = 2048
"""Larger calls have the lengths of calls of this size: their seconds grow with their tokens."""
NEAR = (1 / 2, 3 / 4, 1, 5 / 4, 3 / 2, 2)
"""Slots and rows of calls of grids that are next to another grid, as multiples of its own."""
TILES = (16, 32, 64)
"""Chunk sizes of packed calls."""
TILE_QUERIES = 64
"""Minimum number of queries of a tile for each head of keys on an accelerator, whose products have
as many rows. Grouped heads have several queries for each token."""
TOKENS_PER_PACKED = (512, 1024, 2048, 4096, 8192, 16384, 32768)
"""Tokens of packed calls on an accelerator. Longer prompts leave no rows empty, so calls of these
sizes fill soon."""


@dataclass(frozen=True)
class Budget:
    """Limits of a plan."""

    prefill_graphs: int = 8
    memory_bytes: float = math.inf
    """Memory of each device."""
    compile_seconds: float = math.inf
    """Maximum time to compile all graphs."""
    padding: float = math.inf
    """Maximum ratio of computed to real prompt tokens, dummy rows included."""
    seconds: float = math.inf
    """Seconds to compile and to run of another plan, which a plan should be below."""
    graph_seconds: GraphSeconds = NO_TIME
    """Predicted time to compile a graph; each graph must save at least this time."""

    def with_affordable_graphs(self, *, score: bool) -> "Budget":
        """The same budget with a number of prefill graphs that compile in time."""
        each = self.graph_seconds
        if not (each.prefill and each.decode and math.isfinite(self.compile_seconds)):
            return self
        left = self.compile_seconds - each.beside_prefill
        prefill = min(self.prefill_graphs, max(1, int(left / each.prefill / (1 + score))))
        return replace(self, prefill_graphs=prefill)


def working_bytes(work: Work, grid: BucketGrid) -> float:
    """Estimated bytes that the largest prefill call of a grid needs beside weights and cache."""
    return max(work.working_bytes(grid.prefill_call(bucket)) for bucket in grid.prefill)


def _expected_use(rows: Sequence[ExpectedRow], *, has_chunks: bool) -> SlotUse:
    # a row without expected output is only read
    needs = [row.need if row.output else replace(row.need, max_tokens=0) for row in rows]
    use = SlotUse.of_rows(needs, has_chunks=has_chunks)
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
            raise UserError("workload: expected at least one row that fits the model, got none.")
        self._rows, self._cost, self._defaults = rows, cost, defaults
        self._max_position = max_position
        self._score = any(row.need.is_scored for row in rows)
        self._only_scores = all(row.need.is_only_scored for row in rows)
        self._budget = budget.with_affordable_graphs(score=self._score)
        self._prices = GraphPrices(cost, budget.graph_seconds)
        longest = max(row.need.prompt_length + max(row.output, 1) for row in rows)
        declared = max(row.limit(0) for row in rows)
        asked = defaults.max_length or 0
        wanted = round_up(max(longest, declared, asked), defaults.length_step)
        self.max_length = min(wanted, max_position)
        """Maximum total length of rows."""
        longest_prompt = max(row.need.prompt_length for row in rows)
        if longest_prompt > (max_prompt := defaults.longest_prefill(self.max_length)):
            raise UserError(
                f"prompts: expected at most {max_prompt} tokens, the longest prefill that the "
                f"layout divides and the model allows, got {longest_prompt}."
            )
        self._prompts = np.array([row.need.prompt_length for row in rows])
        self._slot_use = {
            chunks: _expected_use(rows, has_chunks=chunks) for chunks in (False, True)
        }
        self._cuts: dict[int, list[PrefillBucket]] = {}
        self._bounds = RunBounds(
            rows,
            self.max_length,
            cost,
            budget.graph_seconds,
            self._slot_use[True].count_R,
            table,
        )

    def candidates(self, *, may_chunk: bool = True, must_chunk: bool = False) -> list[Candidate]:
        """Candidates within the budget: those of whole prompts unless they must be in chunks, then
        those of chunks if they may be."""
        whole = [] if must_chunk else self.whole_prompt_candidates()
        return [*whole, *(self.chunk_candidates() if may_chunk else ())]

    def whole_prompt_candidates(self) -> Iterator[Candidate]:
        """Candidates that prefill whole prompts."""
        grids = (
            self._grid(slots, buckets)
            for slots in self._slot_counts(has_chunks=False)
            for tokens in self._useful(TOKENS_PER_PREFILL)
            for buckets in self._prefill_choices(tokens, slots)
        )
        return self._within_budget(grid for grid in grids if grid is not None)

    def chunk_candidates(self) -> Iterator[Candidate]:
        """Candidates that prefill prompts in tiles, which fill packed calls."""
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
            and not tile % self._defaults.page_multiple
        ]
        calls = self._useful(TOKENS_PER_PREFILL if is_cpu else TOKENS_PER_PACKED)
        choices = product(self._slot_counts(has_chunks=True), calls, tiles)
        grids = (self._packed(*choice) for choice in choices)
        return self._within_budget(grid for grid in grids if grid is not None)

    def near(self, grid: BucketGrid) -> list[Candidate]:
        """Candidates within the budget with the lengths of a grid, and slots and calls near its."""
        multiples = self._defaults.slot_multiple, self._defaults.batch_multiple
        most = round_up(self._slot_use[bool(grid.chunks)].num_sequences, multiples[0])

        def scaled(value: int, factor: float, multiple: int) -> int:
            return max(1, int(value * factor) // multiple) * multiple

        grids = (
            self._grid(
                min(most, scaled(grid.decode_slots, of_slots, multiples[0])),
                [b._replace(batch=scaled(b.batch, of_calls, multiples[1])) for b in grid.prefill],
            )
            for of_slots, of_calls in product(NEAR if grid.decode_slots else [1], NEAR)
        )
        return list(self._within_budget(one for one in grids if one not in (None, grid)))

    @property
    def min_bytes(self) -> int:
        """Bytes of the weights and the smallest cache on each device."""
        work = self._cost.work
        if self._only_scores:
            return work.parameter_bytes
        return work.parameter_bytes + work.page_bytes(
            round_up(self.max_length, self._defaults.page)
        )

    def _within_budget(self, grids: Iterable[BucketGrid]) -> Iterator[Candidate]:
        for grid in dict.fromkeys(grids):
            is_quick = self._budget.graph_seconds.of_grid(grid) <= self._budget.compile_seconds
            num_bytes = self._cost.work.parameter_bytes + self._cost.work.grid_bytes(grid)
            if is_quick and num_bytes <= self._budget.memory_bytes:
                yield self._bounds.candidate(grid)

    def prefill_buckets(self, tokens: int, slots: int) -> tuple[PrefillBucket, ...]:
        """The cheapest prefill lengths for calls of `tokens` tokens that suit the slots."""
        num_sequences = self._slot_use[False].num_sequences
        return with_small_calls(self._cut(tokens), slots, num_sequences, self._defaults)

    def _prefill_choices(self, tokens: int, slots: int) -> Iterator[Sequence[PrefillBucket]]:
        """The cheapest lengths in small calls, and in calls that may take all slots."""
        yield self.prefill_buckets(tokens, slots)
        if slots:
            most = round_up(slots, self._defaults.batch_multiple)
            yield [b._replace(batch=min(b.batch, most)) for b in self._cut(tokens)]

    def _useful(self, tokens_per_call: Sequence[int]) -> list[int]:
        """The sizes of calls up to the first one that has room for all prompts."""
        every = int(self._prompts.sum()) / self._defaults.batch_multiple
        count = sum(tokens < every for tokens in tokens_per_call)
        return list(tokens_per_call[: count + 1])

    def run_seconds(self, grid: BucketGrid) -> float:
        """Minimum seconds of a run on a grid, without its build and planned prefixes."""
        return self._bounds.run_seconds(grid)

    def _slot_counts(self, *, has_chunks: bool) -> list[int]:
        if self._only_scores and not has_chunks:
            return [0]
        num_sequences = self._slot_use[has_chunks].num_sequences
        multiple = self._defaults.slot_multiple
        sizes = {-(-min(slots, max(num_sequences, 1)) // multiple) for slots in SLOTS}
        return sorted(multiple * size for size in sizes)

    def _cut(self, tokens: int) -> list[PrefillBucket]:
        """Prefill buckets of least cost for calls of up to `tokens` tokens, or of one row."""
        if tokens not in self._cuts:
            if tokens > MAX_TOKENS_TO_CUT:
                self._cuts[tokens] = self._larger_calls(tokens)
                return self._cuts[tokens]
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

    def _larger_calls(self, tokens: int) -> list[PrefillBucket]:
        """The lengths of smaller calls, in calls of up to `tokens` tokens that are equally full."""
        multiple, buckets = self._defaults.batch_multiple, self._cut(MAX_TOKENS_TO_CUT)
        ends = np.searchsorted([bucket.length for bucket in buckets], self._prompts)
        counts = np.bincount(ends, minlength=len(buckets)).tolist()
        larger = []
        for bucket, count in zip(buckets, counts, strict=True):
            max_rows = max(bucket.batch, tokens // bucket.length * multiple)
            num_calls = max(1, -(-count // max_rows))
            larger.append(bucket._replace(batch=round_up(max(1, -(-count // num_calls)), multiple)))
        return larger

    def _packed(self, slots: int, tokens: int, tile: int) -> BucketGrid | None:
        """The grid of packed calls; None if it has no room for a tile or for the pages of a row."""
        if tile > self.max_length:
            return None
        most_pieces = slots * -(-int(self._prompts.max()) // tile)
        multiple = self._defaults.batch_multiple
        batch = round_up(max(1, min(multiple * tokens // tile, most_pieces)), multiple)
        return self._grid(slots, [PrefillBucket(self.max_length, batch, tile)])

    def _grid(self, slots: int, prefill: Sequence[PrefillBucket]) -> BucketGrid | None:
        """The grid of these graphs; None if its pages have no room for a row of its length."""
        calls = calls_to_fill(slots, prefill)
        grid = grid_of(self.max_length, prefill, slots, self._score, self._defaults, calls)
        work = self._cost.work
        beside_calls = self._cost.hardware.memory_bytes - working_bytes(work, grid)
        if not slots:
            return grid if work.parameter_bytes <= beside_calls else None
        grid = with_needed_pages(grid, self._slot_use[bool(grid.chunks)])
        limit = min(self._budget.memory_bytes, beside_calls)
        return pages_in_memory(grid, work, limit - work.parameter_bytes)
