"""Rank layouts for a workload: legality first, then memory, then a lower bound of the seconds.

The bound is the lowest of all candidate grids. No plan under the layout that the search can find is
faster, so a layout whose bound is above the seconds of another layout's plan is not the best.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...compile.abstract_model import AbstractModel, model_sizes
from ...compile.attention_kernels import cache_dtype
from ...compile.grids.adapter_grid import AdapterGrid
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.grids.prefix_table import NOTHING_SHARED, PrefixTable
from ...compile.hardware.hardware import Hardware
from ...compile.planning.candidates import Budget, Candidate, CandidateGrids
from ...compile.planning.cost import Calibration, CostModel
from ...compile.planning.run_bounds import ExpectedRow
from ...compile.planning.work import Work
from ...compile.weight_rules import ALL_FLOAT, WeightRules
from ...modelzoo.config import DecoderConfig
from ...sharding.layout import Layout
from ...sharding.legality import check, require
from ...sharding.mesh_layout import MeshLayout
from ...sharding.placement import arrangement_of
from ..console import GIGABYTE

MAX_DEVICES = 4096
NUM_LAYOUTS_TRIED = 3
"""The number of layouts, those with the smallest need of memory, that are tried on more devices."""


@dataclass(frozen=True)
class RankedLayout:
    """A layout with its bound, or with the reasons why it has none."""

    layout: Layout | None
    cost: CostModel | None = None
    findings: tuple[str, ...] = ()
    """The reasons why the layout cannot be used."""
    candidates: Sequence[Candidate] = ()
    """The candidate grids; none if the layout cannot be used."""
    min_bytes: int | None = None
    """Bytes on each device of the weights and the smallest cache that holds the longest row."""
    max_row_length: int | None = None
    """The length of the longest row, in tokens."""

    @property
    def name(self) -> str:
        return "one device" if self.layout is None else f"{self.layout.name} ({self.layout.mesh})"

    @property
    def bound(self) -> float | None:
        """The lower bound of the seconds to compile and to run; None if it cannot be used."""
        return min((candidate.bound for candidate in self.candidates), default=None)

    def __str__(self) -> str:
        if self.bound is not None:
            return f"\n{self.bound:10.2f} s at least to compile and run: {self.name}"
        return f"\n{self.name}: {' '.join(self.findings)}"


@dataclass(frozen=True)
class Ranking:
    """Ranks the layouts of one model and workload on one kind of device."""

    config: DecoderConfig
    rows: Sequence[ExpectedRow]
    hardware: Hardware
    dtype: str
    budget: Budget
    num_devices: int
    torus: Sequence[int] = ()
    """The dimensions of the interconnect."""
    calibration: Calibration | None = None
    platform: str = "cpu"
    weight_rules: WeightRules = ALL_FLOAT
    cache_codes: str | None = None
    """The dtype of cache entries in codes; None for float entries."""
    adapters: AdapterGrid | None = None
    """The room for adapters, whose matrices are weights."""
    page: int | None = None
    """The entries of a page of the cache; None for those that suit the layout."""
    table: PrefixTable = NOTHING_SHARED
    """The common beginnings of the rows."""
    max_length: int | None = None
    """The largest length of rows without `max_tokens`; None for that of the rows."""
    may_chunk: bool = True
    must_chunk: bool = False
    _definitions: dict[object, AbstractModel] = field(default_factory=dict)

    def rank(self, layouts: Sequence[Layout | None]) -> list[RankedLayout]:
        """The layouts, the fastest first; those without a bound come last, with their reasons."""
        rated = [self._rate(layout) for layout in layouts]
        return sorted(rated, key=lambda ranked: (ranked.bound is None, ranked.bound or 0.0))

    def findings(self, layout: Layout | None) -> tuple[str, ...]:
        """The reasons why a layout is illegal for the model; empty if it is legal."""
        sizes = model_sizes(self.config, self.num_devices, weight_rules=self.weight_rules)
        return () if layout is None else tuple(check(layout, sizes))

    def require(self, layout: Layout | None, grid: BucketGrid | None = None) -> None:
        """Raise IllegalLayout if a layout is illegal for the model, or for a grid of it."""
        if layout is not None:
            sizes = model_sizes(self.config, self.num_devices, grid, self.weight_rules)
            require(layout, sizes)

    def cost(self, layout: Layout | None) -> CostModel:
        """The cost model of calls under a legal layout."""
        codes = self.cache_codes
        stored = cache_dtype(self.config, self.platform, self.dtype, cache_codes=codes)
        work = Work(self._definition(layout), self.dtype, layout, stored)
        return CostModel(work, self.hardware, self.calibration, self.torus)

    def defaults(self, layout: Layout | None) -> GridDefaults:
        """The aims of grids under a layout."""
        defaults = GridDefaults.for_layout(layout, self.platform, self.cache_codes)
        page = defaults.page if self.page is None else self.page
        return replace(defaults, page=page, max_length=self.max_length)

    def budget_under(self, cost: CostModel) -> Budget:
        """The budget, with the seconds to compile graphs under the layout of a cost model."""
        build = self.budget.graph_seconds.with_entries(self.platform, cost.work.entry_bytes)
        return replace(self.budget, graph_seconds=build)

    def _rate(self, layout: Layout | None) -> RankedLayout:
        if findings := self.findings(layout):
            return RankedLayout(layout, findings=findings)
        cost = self.cost(layout)
        try:
            grids = CandidateGrids(
                self.rows,
                self.config.max_position,
                cost,
                self.budget_under(cost),
                self.defaults(layout),
                self.table,
            )
        except ValueError as error:
            return RankedLayout(layout, cost, (str(error),))
        candidates: list[Candidate] = []
        if cost.work.parameter_bytes < self.budget.memory_bytes:
            candidates = grids.candidates(may_chunk=self.may_chunk, must_chunk=self.must_chunk)
        findings = () if candidates else (self._why_unusable(grids.min_bytes),)
        return RankedLayout(layout, cost, findings, candidates, grids.min_bytes, grids.max_length)

    def _why_unusable(self, needed: int) -> str:
        """The reason why no grid fits; the smallest one needs `needed` bytes on each device."""
        allowed = self.budget.memory_bytes
        if needed > allowed:
            return (
                f"weights and the smallest cache need {needed / 1e9:.2f} GB a device, "
                f"{(needed - allowed) / 1e9:.2f} GB more than the {allowed / 1e9:.2f} GB "
                f"available. Use more devices, a layout that splits more, or shorter rows."
            )
        graph, is_scored = self.budget.graph_seconds, any(row.need.is_scored for row in self.rows)
        min_seconds = graph.prefill * (1 + is_scored) + graph.beside_prefill
        if min_seconds > self.budget.compile_seconds:
            return (
                f"compiling the smallest number of graphs takes {min_seconds:.0f} s (predicted), "
                f"more than the {self.budget.compile_seconds:.3g} s allowed. Raise "
                f"--max-compile-minutes."
            )
        return (
            f"weights, the smallest cache ({needed / 1e9:.2f} GB a device) and the working memory "
            f"of a prefill call are more than a device has, or --chunks leaves no grid. Use more "
            f"devices, or shorter prompts."
        )

    def _definition(self, layout: Layout | None) -> AbstractModel:
        """The model, traced once for all layouts with the same arrangement of the weights."""
        arrangement = arrangement_of(
            layout, self.platform, self.config, cache_codes=self.cache_codes
        )
        if arrangement not in self._definitions:
            rules, adapters = self.weight_rules, self.adapters
            definition = AbstractModel(self.config, arrangement, rules, adapters)
            self._definitions[arrangement] = definition
        return self._definitions[arrangement]


def all_layouts(tables: Mapping[str, Mapping[str, object]], num_devices: int) -> Iterator[Layout]:
    """All named layouts over all meshes of `num_devices` devices."""
    for name, table in tables.items():
        layout = Layout.from_table(table, name)
        for mesh in layout.mesh.all_fitted(num_devices):
            yield layout.with_mesh(mesh)


def suggest_fitting_plan(ranking: Ranking, refused: Sequence[RankedLayout]) -> str:
    """A sentence on what would fit; empty if no layout was refused for lack of memory.

    Rows may be shorter, or devices more. Fewer slots do not help: the smallest cache has the
    smallest number of slots that the layout can divide.
    """
    allowed = ranking.budget.memory_bytes
    too_large = [
        ranked for ranked in refused if ranked.min_bytes is not None and ranked.min_bytes > allowed
    ]
    too_large.sort(key=lambda ranked: ranked.min_bytes or 0)
    if not too_large:
        return ""
    layouts = [r.layout for r in too_large[:NUM_LAYOUTS_TRIED] if r.layout is not None]
    suggestions = [_shorter_rows(ranking, too_large[0]), _more_devices(ranking, layouts)]
    return (
        " The closest plan that fits: "
        + (", or ".join(filter(None, suggestions)) or "none under these layouts")
        + "."
    )


def _shorter_rows(ranking: Ranking, ranked: RankedLayout) -> str | None:
    """The longest rows whose cache fits beside the weights; None if no cache does."""
    assert ranked.cost is not None and ranked.max_row_length is not None
    work, page = ranked.cost.work, ranking.defaults(ranked.layout).page
    free = ranking.budget.memory_bytes - work.parameter_bytes
    pages = range(1, -(-ranked.max_row_length // page))
    fitting = bisect_right(pages, free, key=lambda count: work.page_bytes(count * page))
    if not fitting:
        return None
    return (
        f"rows of at most {fitting * page} tokens instead of {ranked.max_row_length}, 1 at a time"
    )


def _more_devices(ranking: Ranking, layouts: Sequence[Layout]) -> str | None:
    """The first doubling of the number of devices at which a layout has a mesh that fits."""
    count = 2 * ranking.num_devices
    while layouts and count <= MAX_DEVICES:
        meshed = [
            layout.with_mesh(mesh) for layout in layouts for mesh in meshes_of(layout.mesh, count)
        ]
        ranked = replace(ranking, num_devices=count, torus=()).rank(meshed)
        fitting = [ranked_layout for ranked_layout in ranked if ranked_layout.bound is not None]
        if fitting:
            best = min(fitting, key=lambda ranked_layout: ranked_layout.min_bytes or 0)
            assert best.layout is not None and best.min_bytes is not None
            return (
                f"{count} devices instead of {ranking.num_devices} ({best.layout.name}, "
                f"{best.layout.mesh}: {best.min_bytes / GIGABYTE:.2f} GB a device)"
            )
        count *= 2
    return None


def meshes_of(mesh: MeshLayout, count: int) -> Iterator[MeshLayout]:
    """All meshes of `count` devices with the same axes; an axis of size 1 keeps its size."""
    wide = MeshLayout(tuple((name, size) for name, size in mesh.axes if size > 1))
    for fitted in wide.all_fitted(count):
        yield MeshLayout.from_table({name: fitted.sizes.get(name, 1) for name, _ in mesh.axes})
