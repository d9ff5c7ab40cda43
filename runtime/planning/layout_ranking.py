"""Layouts by what a workload takes at least under each: legality, memory, then a bound.

The bound is that of the best grid of whole prompts for a sample of the rows, so it is cheap and
ranks layouts that differ in more than a few percent; the first ones deserve a search of their own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ...compile.abstract_model import AbstractModel, model_sizes
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.planning.candidates import Budget, CandidateGrids, ExpectedRow
from ...compile.planning.cost import Calibration, CostModel
from ...compile.planning.hardware import Hardware
from ...compile.planning.work import Work
from ...modelzoo.config import DecoderConfig
from ...sharding.layout import Layout
from ...sharding.legality import ModelSizes, check
from ...sharding.placement import arrangement_of, cache_dtype
from .sample import deciding

SAMPLE = 400
"""Most rows of a bound."""


@dataclass(frozen=True)
class RankedLayout:
    """One layout, and why it is where it is."""

    layout: Layout | None
    cost: CostModel | None = None
    findings: tuple[str, ...] = ()
    """What rules it out."""
    bound: float | None = None
    """Seconds that the sample of rows takes at least; None of a layout that is not ranked."""
    least_bytes: int | None = None
    """On each device, of weights and the smallest cache that holds the longest row."""
    longest: int | None = None
    """Tokens of that row."""

    def __str__(self) -> str:
        name = "one device" if self.layout is None else f"{self.layout.name} ({self.layout.mesh})"
        if self.bound is not None:
            return f"\n{self.bound:10.2f} s at least for the sample: {name}"
        return f"\n{name}: {' '.join(self.findings)}"


@dataclass(frozen=True)
class Ranking:
    """Layouts of one model and workload on one kind of device."""

    config: DecoderConfig
    rows: Sequence[ExpectedRow]
    hardware: Hardware
    dtype: str
    budget: Budget
    num_devices: int
    torus: Sequence[int] = ()
    """Dimensions of the interconnect."""
    calibration: Calibration | None = None
    platform: str = "cpu"
    _definitions: dict[object, AbstractModel] = field(default_factory=dict)

    def rank(self, layouts: Sequence[Layout | None]) -> list[RankedLayout]:
        """The fastest first, then those that are not ranked, with a reason each."""
        found = [self._judge(layout) for layout in layouts]
        return sorted(found, key=lambda ranked: (ranked.bound is None, ranked.bound or 0.0))

    def findings(self, layout: Layout | None) -> tuple[str, ...]:
        """What is against the rules."""
        return () if layout is None else tuple(check(layout, self._sizes))

    def cost(self, layout: Layout | None) -> CostModel:
        """Seconds of calls under a legal layout."""
        stored = cache_dtype(self.platform, self.dtype)
        work = Work(self._definition(layout), self.dtype, layout, stored)
        return CostModel(work, self.hardware, self.calibration, self.torus)

    @property
    def _sizes(self) -> ModelSizes:
        return model_sizes(self.config, self.num_devices)

    def _judge(self, layout: Layout | None) -> RankedLayout:
        if findings := self.findings(layout):
            return RankedLayout(layout, findings=findings)
        cost = self.cost(layout)
        defaults = GridDefaults.for_layout(layout)
        try:
            grids = CandidateGrids(
                self._sample(), self.config.max_position, cost, self.budget, defaults
            )
        except ValueError as error:
            return RankedLayout(layout, cost, (str(error),))
        bound = min((candidate.bound for candidate in grids.of_whole_prompts()), default=None)
        findings = () if bound is not None else (self._why_none(grids.least_bytes),)
        sizes = grids.least_bytes, grids.max_length
        return RankedLayout(layout, cost, findings, bound, *sizes)

    def _sample(self) -> list[ExpectedRow]:
        """Rows in equal steps, and those that decide how long a plan's rows are."""
        return [*self.rows[:: -(-len(self.rows) // SAMPLE)], *deciding(self.rows)]

    def _why_none(self, needed: int) -> str:
        """What keeps the smallest grid from being one, which needs so many bytes."""
        allowed = self.budget.memory_bytes
        if needed > allowed:
            return (
                f"weights and the smallest cache need {needed / 1e9:.2f} GB a device, "
                f"{(needed - allowed) / 1e9:.2f} GB more than the {allowed / 1e9:.2f} GB there "
                f"are. Take more devices, a layout that splits more, or shorter rows."
            )
        graph, is_scored = self.budget.graph_seconds, any(row.need.is_scored for row in self.rows)
        fewest = graph.prefill * (1 + is_scored) + graph.decode
        return (
            f"building the fewest graphs takes {fewest:.0f} s (predicted), longer than the "
            f"{self.budget.compile_seconds:.3g} s there are. Raise --max-compile-minutes."
        )

    def _definition(self, layout: Layout | None) -> AbstractModel:
        """Traced once for all layouts that arrange weights alike."""
        arrangement = arrangement_of(layout, self.platform, self.config)
        if arrangement not in self._definitions:
            self._definitions[arrangement] = AbstractModel(self.config, arrangement)
        return self._definitions[arrangement]


def all_layouts(tables: Mapping[str, Mapping[str, object]], num_devices: int) -> Iterator[Layout]:
    """Every named layout over every mesh of so many devices."""
    for name, table in tables.items():
        layout = Layout.from_table(table, name)
        for mesh in layout.mesh.all_fitted(num_devices):
            yield layout.with_mesh(mesh)
