"""Makes the plan of a batch job: a given plan or one derived from its rows, with overrides.

Rows without `max_tokens` may continue to the model's context if the cache for it fits into a share
of the memory; if not, the plan gives the reason why they end earlier. Does not know about files.
"""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from ...compile.expert_plan import default_experts
from ...compile.grids.adapter_grid import AdapterGrid
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.default_grid import derive_grid, slot_use, with_chunks, with_overrides
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.grids.page_count import expected_pages
from ...compile.grids.prefill_ladder import prefill_padding
from ...compile.grids.prefix_choice import own_lengths, prefixes_of_rows
from ...compile.grids.prefix_table import PrefixTable
from ...compile.grids.row_shape import RowShape
from ...compile.grids.span_slots import with_ragged_slots
from ...compile.grids.structured_grid import StructuredGrid
from ...compile.plan import Numbers, Plan, PlannedModel
from ...compile.planning.graph_prices import GraphPrices
from ...compile.planning.page_choice import pages_in_memory, rows_in_memory
from ...compile.planning.run_bounds import ExpectedRow
from ...compile.planning.work import Work
from ...compile.target_names import TargetName
from ...compile.targets import Target
from ...modelzoo.config import DecoderConfig
from ...modelzoo.config_values import check_count
from ...sharding.layout import Layout
from ...sharding.legality import chunk_findings
from ..checkpoint.published_numbers import overridden_numbers, override_plan
from ..console import plural
from ..devices.graph_memory import GIGABYTE, MEMORY_SHARE, device_bytes
from ..files.hardware_files import known_hardware
from ..files.run_config import apply_overrides
from ..planning.better_plan import OtherGrids, better_plan_note
from ..planning.shared_grids import expected_rows, fits_grid, forecast_steps, with_sharing
from ..planning.target_work import cache_fits, room_on_accelerator, rows_fit_pages, work_of
from ..pods.peers import ALONE, Peers

_KEYS_WITHOUT_SHARING = {"chunk", "prefill", "decode_spans", "decode_graphs"}
"""If the user sets one of these keys of `[buckets]`, no grid with shared beginnings is tried."""
_KEYS_WITHOUT_PREFIXES = {
    "decode_slots", "max_length", "score", "span_slots", "slot_groups", "page",
}  # fmt: skip
"""If the user sets one of these keys of `[buckets]`, no prefixes are derived.

With prefixes, slots must divide into groups, and some of the keys would mean something else.
"""
OTHER_CHUNK = 256
"""The length of the chunks that the note on padding compares with whole prompts."""


def given_plan(table: Mapping[str, Any], overrides: Sequence[str]) -> Plan:
    """The plan in a table, changed by the user's overrides.

    Raises:
        ValueError: A key is unknown or its value is invalid; the error names the key.
    """
    return Plan.from_table(override_plan(table, overrides))


@dataclass(frozen=True)
class PlanBasis:
    """The facts from which a plan is derived, besides the rows of the job."""

    target: Target
    model: PlannedModel
    numbers: Numbers
    config: DecoderConfig
    layout: Layout | None = None
    overrides: Sequence[str] = ()
    """Settings `a.b=value`; some of them also change the sizes that are derived."""
    structured: StructuredGrid | None = None
    """The forms of answers that rows ask for."""
    adapters: AdapterGrid | None = None
    """The room that the adapters of the job need."""


def derived_plan(
    rows: Sequence[RowShape], table: PrefixTable, basis: PlanBasis, peers: Peers = ALONE
) -> Plan:
    """A plan for the rows of a job, changed by the user's overrides.

    Args:
        rows: The rows that can run.
        table: The beginnings that the prompts of the rows share.
        basis: All other facts.
        peers: The processes of the job, which must derive the same plan.

    Raises:
        ValueError: A key of the overrides is unknown or its value is invalid.
    """
    # the memory of process 0, so that all processes derive the same plan
    derivation = _Derivation.of(basis, peers.broadcast(device_bytes(basis.target)))
    grid, reason = derivation.grid(rows, table)
    grid = replace(grid, structured=basis.structured, adapters=basis.adapters)
    plan = Plan(
        basis.target.name,
        basis.model,
        derivation.numbers,
        grid,
        basis.layout,
        default_experts(basis.config),
        max_length_reason=reason,
    )
    plan = given_plan(tomllib.loads(plan.to_toml()), basis.overrides)
    own_rows = rows_after_prefixes(rows, table, plan.buckets)
    return replace(plan, buckets=derivation.without_idle_graphs(plan, own_rows))


@dataclass(frozen=True)
class _Derivation:
    """Derives the grid of a plan."""

    basis: PlanBasis
    memory_bytes: int
    asked: Mapping[str, Any]
    """The keys of `[buckets]` that the user sets."""
    numbers: Numbers
    defaults: GridDefaults
    work: Work
    prices: GraphPrices

    @classmethod
    def of(cls, basis: PlanBasis, memory_bytes: int) -> "_Derivation":
        layout, target, overrides = basis.layout, basis.target, basis.overrides
        # overrides of some keys change the derived sizes; later all overrides are applied
        overridden = apply_overrides({"numbers": basis.numbers.to_table()}, overrides)
        asked, numbers = overridden.get("buckets", {}), overridden_numbers(basis.numbers, overrides)
        defaults = with_overrides(GridDefaults.for_layout(layout, target.platform), asked)
        work = work_of(basis.config, numbers, layout, target, basis.adapters)
        prices = GraphPrices.of_target(target.name, work, known_hardware())
        return cls(basis, memory_bytes, asked, numbers, defaults, work, prices)

    def grid(self, rows: Sequence[RowShape], table: PrefixTable) -> tuple[BucketGrid, str]:
        """The grid, and why rows without `max_tokens` end before the model's context."""
        config, layout = self.basis.config, self.basis.layout
        fits, reason = self._limit(rows)
        holds = room_on_accelerator(self.work, self.basis.target, self.memory_bytes)

        def derive(rows: Sequence[RowShape], defaults: GridDefaults) -> BucketGrid:
            if (page := self.defaults.page) is not None:
                return self._grid_of_pages(rows, defaults, fits, page)
            return derive_grid(rows, config.max_position, defaults, fits, self.prices, holds)

        grid = derive(rows, self.defaults)
        may_share = layout is None or grid.page is not None or not any(chunk_findings(layout))
        if may_share and not _KEYS_WITHOUT_SHARING & set(self.asked):
            fitting = [i for i, row in enumerate(rows) if fits_grid(row, grid)]
            expected = expected_rows([rows[i] for i in fitting], grid)
            shared, may_group = table.of_rows(fitting), not _KEYS_WITHOUT_PREFIXES & set(self.asked)
            grid = with_sharing(
                grid, expected, shared, self.defaults, self.prices, derive, may_group=may_group
            )
        is_whole = grid.max_length >= self.defaults.longest_span(config.max_position)
        return grid, "" if is_whole else reason

    def _grid_of_pages(
        self,
        rows: Sequence[RowShape],
        defaults: GridDefaults,
        fits: Callable[[int, int], bool] | None,
        page: int,
    ) -> BucketGrid:
        """The grid with a cache of pages, and with as many slots as rows are expected to fill it.

        Raises:
            ValueError: There is no room for the pages of one row.
        """
        max_position = self.basis.config.max_position
        use = slot_use(
            [row for row in rows if row.min_length <= max_position],
            has_chunks=bool(defaults.chunks),
        )
        max_bytes = self._bytes_for_pages()
        if (asked := self.asked.get("pages")) is not None:
            check_count("buckets.pages", asked)
        if self.basis.target.platform != "cpu":
            expected = expected_pages(use, page, defaults.unspecified_output)
            at_once = rows_in_memory(self.work, page, expected, defaults.chunks, max_bytes)
            if asked is not None:
                at_once = asked / expected
            slots = max(1, int(min(defaults.max_decode_slots, at_once)))
            defaults = replace(defaults, max_decode_slots=slots)
        grid = derive_grid(rows, max_position, defaults, fits, self.prices)
        if slots := self.asked.get("decode_slots"):
            check_count("buckets.decode_slots", slots)
            grid = replace(grid, decode_slots=slots)
        groups = defaults.slot_groups
        if asked is not None:
            max_bytes = math.inf
        paged = pages_in_memory(grid, use, page, groups, self.work, max_bytes)
        if paged is None:
            room, needed = (
                self.work.num_pages(max_bytes, page),
                groups * -(-grid.max_length // page),
            )
            raise ValueError(
                f"buckets.page: expected room for {needed} pages of {page}, as a row of "
                f"{grid.max_length} tokens takes in each group of slots, got {int(room)} in the "
                f"memory that weights leave. Give buckets.pages, a shorter buckets.max_length, or "
                f"a layout that splits more."
            )
        return paged

    def _bytes_for_pages(self) -> float:
        """The bytes of memory beside the weights that pages may have, where it is known."""
        if not self.memory_bytes:
            return math.inf
        weights = self.work.parameter_bytes
        room = MEMORY_SHARE * self.memory_bytes - weights
        if self.basis.target.platform == "cpu":
            room = self.defaults.cpu_cache_share * (self.memory_bytes - weights)
        return room

    def _limit(self, rows: Sequence[RowShape]) -> tuple[Callable[[int, int], bool] | None, str]:
        """Whether a cache is small enough, for rows without `max_tokens`; and the reason if not."""
        defaults = self.defaults
        if defaults.max_length is not None or all(row.max_tokens is not None for row in rows):
            return None, ""
        is_cpu = self.basis.target.platform == "cpu"
        share = defaults.cpu_cache_share if is_cpu else defaults.cache_share
        free_bytes = self.memory_bytes - self.work.parameter_bytes
        fits = partial(cache_fits, self.work, share * free_bytes)
        if (page := defaults.page) is not None:
            groups = defaults.slot_groups
            fits = partial(rows_fit_pages, self.work, share * free_bytes, page, groups)
        return fits, (
            f"a longer cache would take more than {share:g} of the memory that weights leave "
            f"({free_bytes / GIGABYTE:.1f} GB per device)"
        )

    def without_idle_graphs(self, plan: Plan, rows: Sequence[RowShape]) -> BucketGrid:
        """The grid of a plan without slots and decode graphs that these rows do not need."""
        grid = plan.buckets
        use = slot_use(rows, has_chunks=bool(grid.chunks))
        # rows are submitted in order of length; if they wait for slots, the slots hold rows of
        # similar length at any time and need equal capacity
        if use.num_sequences <= grid.decode_slots and grid.prefixes is None:
            grid = with_ragged_slots(grid, use, plan.layout)
        if grid.pages is None and not {"decode_spans", "decode_graphs"} & set(self.asked):
            grid = self.prices.without_idle_spans(grid, forecast_steps(rows, grid))
        return grid


def rows_after_prefixes(
    rows: Sequence[RowShape], table: PrefixTable, grid: BucketGrid
) -> Sequence[RowShape]:
    """The rows without the planned prefixes that they begin with."""
    if grid.prefixes is None:
        return rows
    lengths = np.array([row.prompt_length for row in rows], np.int64)
    own = own_lengths(lengths.tolist(), prefixes_of_rows(table, lengths, grid.prefixes))
    return [replace(row, prompt_length=length) for row, length in zip(rows, own, strict=True)]


def notes_on_rows(
    plan: Plan, rows: Sequence[RowShape], table: PrefixTable, max_position: int
) -> list[str]:
    """Notes on the padding of a plan, on what rows share, and on rows that end early."""
    own_rows = rows_after_prefixes(rows, table, plan.buckets)
    notes = [
        padding_note(own_rows, plan, max_position),
        sharing_note(rows, table, plan.buckets),
        limit_note(plan, rows, max_position),
    ]
    return [note for note in notes if note]


def limit_note(plan: Plan, rows: Sequence[RowShape], max_position: int) -> str | None:
    """A note on where and why rows without `max_tokens` end before the model's context.

    None if they do not.
    """
    count, limit = sum(row.max_tokens is None for row in rows), plan.buckets.max_length
    if not count or limit >= max_position:
        return None
    reason = plan.max_length_reason or "as the plan or --set says"
    after = "" if plan.buckets.prefixes is None else ", after its prefix"
    return (
        f"{plural(count, 'row')} without max_tokens: at most {limit} tokens each, prompt "
        f"included{after}, of the model's {max_position}: {reason}. Without --plan, --set "
        f"buckets.max_length=N changes it."
    )


def padding_note(rows: Sequence[RowShape], plan: Plan, max_position: int) -> str:
    """A note that compares the padding of whole prompts with the padding of chunked prompts."""
    grid, defaults = plan.buckets, _defaults(plan)
    if not grid.chunks:
        defaults = with_chunks(defaults, min(OTHER_CHUNK, grid.max_length))
    # the other grid may be longer than `grid`, as it rounds prompts up to whole chunks
    other = derive_grid(rows, max_position, defaults)
    return f"prefill: {_padding(rows, grid)}; {_padding(rows, other)} otherwise"


def sharing_note(rows: Sequence[RowShape], table: PrefixTable, grid: BucketGrid) -> str | None:
    """A note on the prompt tokens that rows share; None if there are none.

    Rows that do not fit the grid, or have no room for an answer of their form, are refused. So they
    do not count.
    """
    own_rows = rows_after_prefixes(rows, table, grid)
    fitting = [i for i, row in enumerate(own_rows) if fits_grid(row, grid)]
    lengths = np.array([row.prompt_length for row in rows], np.int64)
    num_tokens = plural(int(lengths[fitting].sum()), "token")
    if (prefixes := grid.prefixes) is not None:
        planned = prefixes_of_rows(table, lengths, prefixes)
        found = [prefix for i in fitting if (prefix := planned[i])]
        num_saved = sum(p.length for p in found) - sum(p.length for p in set(found))
        return (
            f"prompts that begin alike: {num_saved} of {num_tokens} are "
            f"read from {plural(len(set(found)), 'beginning')} and not computed again"
        )
    shared = 0
    if grid.chunks:
        pieces = table.of_rows(fitting).shared_pieces(lengths[fitting], grid.chunks)
        shared = int(pieces.sum())
    if not shared:
        return None
    return f"prompts that begin alike: {shared} of {num_tokens} can be copied"


def better_plan(
    plan: Plan,
    work: Work,
    max_position: int,
    shapes: Mapping[int, RowShape],
    prefixes: PrefixTable,
    outputs: Mapping[int, int],
    run_seconds: float,
) -> str | None:
    """A note on a plan that would have saved much of a finished run; None if there is none.

    Args:
        plan: The plan of the job.
        work: The work of its graphs.
        max_position: The longest sequence of the model.
        shapes: The rows that can run, by number.
        prefixes: What the prompts of all rows share.
        outputs: The average number of output tokens of a row's sequences, by the numbers of the
            rows that have a result.
        run_seconds: The seconds of the run.
    """
    # a finished job does not fail for a note that nobody can compute, as on unknown hardware
    with suppress(KeyError, ValueError):
        return better_plan_note(
            plan.buckets,
            [ExpectedRow(shapes[row], output) for row, output in outputs.items()],
            prefixes.of_rows(list(outputs)),
            OtherGrids(
                GraphPrices.of_target(plan.target, work, known_hardware()),
                _defaults(plan),
                max_position,
                may_chunk=plan.layout is None
                or plan.buckets.page is not None
                or not any(chunk_findings(plan.layout)),
            ),
            run_seconds,
        )
    return None


def _defaults(plan: Plan) -> GridDefaults:
    """The aims of grids that are compared with that of a plan."""
    defaults = GridDefaults.for_layout(plan.layout, TargetName.parse(plan.target).platform)
    return replace(defaults, page=plan.buckets.page)


def _padding(rows: Sequence[RowShape], grid: BucketGrid) -> str:
    longest = grid.prefill[-1].length
    prompts = [row.prompt_length for row in rows]
    lengths = [length for length in prompts if grid.needed_length(length) <= longest]
    real, computed = prefill_padding(lengths, grid.prefill)
    share = (computed - real) / computed if computed else 0.0
    chunks = " and ".join(map(str, grid.chunks))
    how = f"chunks of {chunks}" if chunks else "whole prompts"
    given = f"{plural(real, 'token')} in {plural(len(lengths), 'row')}"
    return f"{given}, {computed} computed in {how}, {share:.1%} padding"
