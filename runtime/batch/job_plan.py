"""Makes the plan of a batch job: a given plan or one derived from its rows, with overrides.

Rows without `max_tokens` may continue to the model's context if the cache for it fits into a share
of the memory; if not, the plan gives the reason why they end earlier. Does not know about files.
"""

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...compile.expert_plan import ExpertPlan, default_experts
from ...compile.grids.adapter_grid import AdapterGrid
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.default_grid import (
    derive_grid,
    with_overrides,
)
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.grids.grid_values import check_row_tokens
from ...compile.grids.page_count import expected_pages, with_needed_pages
from ...compile.grids.prefix_table import PrefixTable
from ...compile.grids.row_shape import RowShape
from ...compile.grids.slot_use import SlotUse
from ...compile.grids.structured_grid import StructuredGrid
from ...compile.plan import Numbers, Plan, PlannedModel
from ...compile.planning.graph_prices import GraphPrices
from ...compile.planning.page_choice import row_bytes
from ...compile.targets import Target
from ...modelzoo.config import DecoderConfig
from ...modelzoo.config_values import check_count
from ...sharding.layout import Layout
from ..checkpoint.published_numbers import overridden_numbers, override_plan
from ..devices.graph_memory import GIGABYTE, device_bytes
from ..errors import UserError
from ..files.hardware_files import known_hardware
from ..files.run_config import apply_overrides
from ..planning.shared_grids import expected_rows, fits_grid, with_sharing
from ..planning.target_work import bytes_for_pages, in_memory_of, rows_fit, work_of
from ..pods.peers import ALONE, Peers

_KEYS_WITHOUT_SHARING = {"chunk", "prefill"}
"""If the user sets one of these keys of `[buckets]`, no grid with shared beginnings is tried."""


def given_plan(table: Mapping[str, Any], overrides: Sequence[str]) -> Plan:
    """The plan in a table, changed by the user's overrides.

    Raises:
        ValueError: A key is unknown or its value is invalid; the error names the key.
    """
    return Plan.from_table(override_plan(table, overrides))


def with_layout(plan: Plan, layout: Layout, target: Target) -> Plan:
    """A plan that has no layout, with one for a target, and with the groups of slots that it needs.

    Raises:
        ValueError: Slots and pages cannot be split into these groups.
    """
    codes = plan.numbers.cache_codes
    groups = GridDefaults.for_layout(layout, target.platform, codes).slot_groups
    has_groups = groups > 1 and plan.buckets.decode_slots > 0
    buckets = replace(plan.buckets, slot_groups=groups if has_groups else None)
    return replace(plan, target=target.name, layout=layout, buckets=buckets)


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
    memory_bytes = peers.broadcast(device_bytes(basis.target))
    return _Derivation(basis, memory_bytes).plan(rows, table)


class _Derivation:
    """Derives the grid of a plan."""

    def __init__(self, basis: PlanBasis, memory_bytes: int):
        self.basis, self.memory_bytes = basis, memory_bytes
        layout, target, overrides = basis.layout, basis.target, basis.overrides
        # overrides of some keys change the derived sizes; later all overrides are applied
        overridden = apply_overrides({"numbers": basis.numbers.to_table()}, overrides)
        self.asked: Mapping[str, Any] = overridden.get("buckets", {})
        """The keys of `[buckets]` that the user sets."""
        self.numbers = overridden_numbers(basis.numbers, overrides)
        defaults = GridDefaults.for_layout(layout, target.platform, self.numbers.cache_codes)
        self.defaults = with_overrides(defaults, self.asked)
        self.work = work_of(basis.config, self.numbers, layout, target, basis.adapters)
        self.prices = GraphPrices.of_target(target.name, self.work, known_hardware())
        self.has_capacity = ExpertPlan.from_table(overridden.get("experts", {})).has_capacity
        """Whether experts have a capacity, so that no row may lack pages and be computed again."""

    def plan(self, rows: Sequence[RowShape], table: PrefixTable) -> Plan:
        """The plan, changed by the user's overrides.

        Raises:
            ValueError: The value of an override is invalid, or the plan cannot have pages.
        """
        basis = self.basis
        grid, reason = self.grid(rows, table)
        grid = replace(grid, structured=basis.structured, adapters=basis.adapters)
        experts = default_experts(basis.config)
        plan = Plan(
            basis.target.name, basis.model, self.numbers, grid, basis.layout, experts,
            max_length_reason=reason,
        )  # fmt: skip
        return Plan.from_table(override_plan(tomllib.loads(plan.to_toml()), basis.overrides))

    def grid(self, rows: Sequence[RowShape], table: PrefixTable) -> tuple[BucketGrid, str]:
        """The grid, and why rows without `max_tokens` end before the model's context."""
        fits, reason = self._limit(rows)

        def derive(rows: Sequence[RowShape], defaults: GridDefaults) -> BucketGrid:
            return self._grid_in_memory(rows, defaults, fits)

        grid = derive(rows, self.defaults)
        # with a capacity, rows share nothing, as other rows of a call decide what a prompt loses
        if not self.has_capacity and not _KEYS_WITHOUT_SHARING & set(self.asked):
            fitting = [i for i, row in enumerate(rows) if fits_grid(row, grid)]
            expected = expected_rows([rows[i] for i in fitting], grid)
            shared = table.of_rows(fitting)
            grid = with_sharing(grid, expected, shared, self.defaults, self.prices, derive)
        is_whole = grid.max_length >= self.basis.config.max_position
        return grid, "" if is_whole else reason

    def _grid_in_memory(
        self,
        rows: Sequence[RowShape],
        defaults: GridDefaults,
        fits: Callable[[int], bool] | None,
    ) -> BucketGrid:
        """The grid with the pages that memory holds, and the slots that are expected to fill them.

        Raises:
            ValueError: There is no room for the pages of one row.
        """
        target, max_position = self.basis.target, self.basis.config.max_position
        use = SlotUse.of_rows(
            [row for row in rows if row.min_length <= max_position],
            has_chunks=bool(defaults.chunks),
        )
        # the bytes of memory beside the weights that pages may have, infinite if not known
        share = self.defaults.cpu_cache_share
        max_bytes = bytes_for_pages(self.work, target, self.memory_bytes, share)
        page = defaults.page
        if (asked := self.asked.get("pages")) is not None:
            check_count("buckets.pages", asked)
            max_bytes = math.inf
        if target.platform != "cpu":
            expected = expected_pages(use, page, defaults.unspecified_output)
            at_once = max_bytes / row_bytes(self.work, page, expected, defaults.chunks)
            if asked is not None:
                at_once = asked / expected
            slots = max(1, int(min(defaults.max_decode_slots, at_once)))
            defaults = replace(defaults, max_decode_slots=slots)
        grid = derive_grid(rows, max_position, defaults, fits, self.prices)
        if not grid.decode_slots:
            return grid
        if slots := self.asked.get("decode_slots"):
            check_count("buckets.decode_slots", slots)
            grid = with_needed_pages(replace(grid, decode_slots=slots), use)
        if self.has_capacity:
            grid = replace(grid, pages=grid.most_pages)
        row_tokens = self.asked.get("row_tokens")
        if row_tokens is not None:
            check_row_tokens(row_tokens, grid.chunks)
        found = in_memory_of(grid, self.work, target, max_bytes, row_tokens)
        if found is None:
            room = self.work.num_pages(max_bytes, page)
            needed = defaults.slot_groups * grid.num_pages(grid.max_length)
            raise UserError(
                f"buckets.page: expected room for {needed} pages of {page}, as a row of "
                f"{grid.max_length} tokens takes in each group of slots, got {int(room)} in the "
                f"memory that weights leave. Give buckets.pages, a shorter buckets.max_length, or "
                f"a layout that splits more."
            )
        if self.has_capacity and asked is None and found.pages is not None:
            slots = found.pages // found.num_pages(found.max_length)
            slots = min(
                found.decode_slots, slots // defaults.slot_multiple * defaults.slot_multiple
            )
            found = replace(found, decode_slots=slots)
            found = replace(found, pages=found.most_pages)
        return found

    def _limit(self, rows: Sequence[RowShape]) -> tuple[Callable[[int], bool] | None, str]:
        """Whether rows of a length may be planned, for those without `max_tokens`; why if not."""
        defaults = self.defaults
        if defaults.max_length is not None or all(row.max_tokens is not None for row in rows):
            return None, ""
        is_cpu = self.basis.target.platform == "cpu"
        share = defaults.cpu_cache_share if is_cpu else defaults.cache_share
        free_bytes = self.memory_bytes - self.work.parameter_bytes
        # rows share pages, so there must be room for one of the longest rows
        fits = partial(rows_fit, self.work, share * free_bytes, defaults, defaults.slot_groups)
        return fits, (
            f"a longer cache would take more than {share:g} of the memory that weights leave "
            f"({free_bytes / GIGABYTE:.1f} GB per device)"
        )
