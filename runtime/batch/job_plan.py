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

from ...compile.abstract_model import model_sizes
from ...compile.attention_kernels import PORTABLE
from ...compile.expert_plan import default_experts
from ...compile.grids.adapter_grid import AdapterGrid
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.default_grid import (
    asks_for_no_pages,
    derive_grid,
    slot_use,
    with_overrides,
)
from ...compile.grids.grid_defaults import GridDefaults, page_size
from ...compile.grids.grid_values import check_row_tokens
from ...compile.grids.page_count import expected_pages
from ...compile.grids.prefix_table import PrefixTable
from ...compile.grids.row_shape import RowShape
from ...compile.grids.span_slots import with_ragged_slots
from ...compile.grids.structured_grid import StructuredGrid
from ...compile.plan import Numbers, Plan, PlannedModel
from ...compile.planning.graph_prices import GraphPrices
from ...compile.planning.page_choice import pages_in_memory, row_bytes
from ...compile.planning.work import Work
from ...compile.targets import Target
from ...modelzoo.config import DecoderConfig
from ...modelzoo.config_values import check_count
from ...sharding.layout import Layout
from ...sharding.legality import chunk_findings, require
from ..checkpoint.published_numbers import overridden_numbers, override_plan
from ..devices.graph_memory import GIGABYTE, MEMORY_SHARE, device_bytes
from ..files.hardware_files import known_hardware
from ..files.run_config import apply_overrides
from ..planning.shared_grids import expected_rows, fits_grid, forecast_steps, with_sharing
from ..planning.target_work import cache_fits, room_on_accelerator, rows_fit_pages, work_of
from ..plans.plan_checks import attention_kernels
from ..pods.peers import ALONE, Peers

_KEYS_WITHOUT_SHARING = {"chunk", "prefill", "decode_spans", "decode_graphs"}
"""If the user sets one of these keys of `[buckets]`, no grid with shared beginnings is tried."""
_KEYS_OF_PAGES = {"pages", "row_tokens"}
"""If the user sets one of these keys of `[buckets]` for an accelerator, the cache has pages."""
_KEYS_OF_SPANS = {"decode_spans", "decode_graphs", "span_slots"}
"""If the user sets one of these keys of `[buckets]`, the cache has no pages."""


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

    On an accelerator its cache has pages, unless the user asks for none, something else in the plan
    cannot be with pages, or no kernel reads them.

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
    if (page := derivation.default_page) is not None:
        with suppress(ValueError):
            plan = derivation.with_page(page).plan(rows, table)
            if derivation.has_page_kernel(plan):
                return plan
    return derivation.plan(rows, table)


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
        if _KEYS_OF_PAGES & set(asked) and "page" not in asked:
            defaults = replace(defaults, page=page_size(target.platform))
        work = work_of(basis.config, numbers, layout, target, basis.adapters)
        prices = GraphPrices.of_target(target.name, work, known_hardware())
        return cls(basis, memory_bytes, asked, numbers, defaults, work, prices)

    @property
    def default_page(self) -> int | None:
        """The entries of a page that the target has by default, if the user leaves that open."""
        is_open = not {"page", *_KEYS_OF_PAGES, *_KEYS_OF_SPANS} & set(self.asked)
        return page_size(self.basis.target.platform) if is_open else None

    def with_page(self, page: int) -> "_Derivation":
        """The derivation of a plan with pages."""
        return replace(self, defaults=replace(self.defaults, page=page))

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
        table_of_plan = override_plan(tomllib.loads(plan.to_toml()), basis.overrides)
        if asks_for_no_pages(self.asked):
            del table_of_plan["buckets"]["page"]
        plan = Plan.from_table(table_of_plan)
        plan = replace(plan, buckets=self.without_idle_graphs(plan, rows))
        if plan.layout is not None and plan.buckets.page is not None:
            num_devices, rules = len(basis.target.devices), plan.numbers.weight_rules
            require(plan.layout, model_sizes(basis.config, num_devices, plan.buckets, rules))
        return plan

    def has_page_kernel(self, plan: Plan) -> bool:
        """Whether a kernel of decode reads the pages of rows alone, if the plan has pages.

        The portable form reads as many pages for each row as the longest one has.

        Raises:
            ValueError: The plan asks for a kernel that does not serve its graphs.
        """
        decode = attention_kernels(plan, self.basis.config, self.basis.target).decode
        return plan.buckets.page is None or decode is None or decode.kernel != PORTABLE

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
        reads_chunks = layout is None or not any(chunk_findings(layout))
        if (reads_chunks or grid.page is not None) and not _KEYS_WITHOUT_SHARING & set(self.asked):
            fitting = [i for i, row in enumerate(rows) if fits_grid(row, grid)]
            expected = expected_rows([rows[i] for i in fitting], grid)
            shared = table.of_rows(fitting)
            grid = with_sharing(grid, expected, shared, self.defaults, self.prices, derive)
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
            grid = replace(grid, decode_slots=slots)
        groups = defaults.slot_groups
        if asked is not None:
            max_bytes = math.inf
        row_tokens = self.asked.get("row_tokens")
        if row_tokens is not None:
            check_row_tokens(row_tokens, 1, grid.chunks)
        paged = pages_in_memory(grid, use, page, groups, self.work, max_bytes, row_tokens)
        if paged is None:
            room = self.work.num_pages(max_bytes, page)
            needed = groups * -(-grid.max_length // page)
            raise ValueError(
                f"buckets.page: expected room for {needed} pages of {page}, as a row of "
                f"{grid.max_length} tokens takes in each group of slots, got {int(room)} in the "
                f"memory that weights leave. Give buckets.pages, a shorter buckets.max_length, or "
                f"a layout that splits more."
            )
        return paged

    def _bytes_for_pages(self) -> float:
        """The bytes of memory beside the weights that pages may have, infinite if not known."""
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
            max_bytes, chunks = share * free_bytes, defaults.chunks
            fits = partial(rows_fit_pages, self.work, max_bytes, page, groups, chunks)
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
