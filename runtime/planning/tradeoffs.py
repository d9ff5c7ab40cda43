"""What a user waits for against what a device yields: every layout, over numbers of slots.

A point is a layout with so many decode slots: seconds of a decode step, over the middle one of
the plan's spans, and tokens a second. More slots yield more and take longer, so no point is best; a
point is on the front if no other is faster and yields more a device (as in Pope et al. 2022,
"Efficiently Scaling Transformer Inference", 2211.05102, figure 1). Layouts of half and of twice the
devices stand beside them, on meshes of the best layouts' axes.

Every second is a prediction. Nothing is compiled or searched.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ...compile.bucket_grid import BucketGrid
from ...compile.grid_defaults import GridDefaults
from ...compile.planning.cost import CostModel
from ...sharding.call import Call
from .layout_ranking import RankedLayout, Ranking
from .nearest import meshes_of

MOST_SLOTS = 4096
LAYOUTS_SCALED = 3
"""Of the best ranked, for other numbers of devices."""


@dataclass(frozen=True)
class Tradeoff:
    """One layout with one number of slots."""

    layout: str
    mesh: str
    devices: int
    slots: int
    step_seconds: float
    """Between two tokens of a row."""
    tokens_per_second: float
    is_best: bool = False
    """Whether no other point is as fast and yields more a device."""

    @property
    def per_device(self) -> float:
        """Tokens a second."""
        return self.tokens_per_second / self.devices


def tradeoffs(ranking: Ranking, ranked: Sequence[RankedLayout], grid: BucketGrid) -> list[Tradeoff]:
    """Points of all ranked layouts, and of the best of them on other numbers of devices."""
    costs = [one.cost for one in ranked if one.bound is not None and one.cost is not None]
    costs += _on_other_devices(ranking, ranked)
    points = [point for cost in costs for point in _points(cost, grid, ranking.budget.memory_bytes)]
    return [replace(one, is_best=_is_best(one, points)) for one in points]


def _on_other_devices(ranking: Ranking, ranked: Sequence[RankedLayout]) -> Iterator[CostModel]:
    """Of half and of twice the devices, where there are several and they are not simulated."""
    if ranking.num_devices == 1 or ranking.hardware.name == "cpu":
        return
    names: dict[str, RankedLayout] = {}
    for one in ranked:
        if one.bound is not None and one.layout is not None:
            names.setdefault(one.layout.name, one)
    for count in (ranking.num_devices // 2, 2 * ranking.num_devices):
        torus = _slice(ranking.torus, count)
        other = replace(ranking, num_devices=count, torus=torus, calibration=None)
        if count == 1:
            yield other.cost(None)
            continue
        for one in list(names.values())[:LAYOUTS_SCALED]:
            assert one.layout is not None
            for mesh in meshes_of(one.layout.mesh, count):
                layout = one.layout.on(mesh)
                if not other.findings(layout):
                    yield other.cost(layout)


def _slice(torus: Sequence[int], count: int) -> tuple[int, ...]:
    """Dimensions of half or twice a slice: its longest one halved, or its shortest one doubled.

    Google's slices come so: 2x4, 4x4, 4x8; 2x4x4, 4x4x4, 4x4x8.
    """
    sizes = sorted(torus)
    if count < math.prod(sizes):
        *others, longest = sizes
        sizes = [*others, longest // 2]
    elif sizes:
        shortest, *others = sizes
        sizes = [2 * shortest, *others]
    return tuple(sorted(sizes))


def _points(cost: CostModel, grid: BucketGrid, memory_bytes: float) -> Iterator[Tradeoff]:
    """Doubling slots, as long as weights and cache fit."""
    if not grid.decode_slots:
        return
    work, span = cost.work, grid.decode_spans[len(grid.decode_spans) // 2]
    defaults = GridDefaults.for_layout(work.layout)
    slots = defaults.slot_multiple
    while slots <= MOST_SLOTS:
        if work.parameter_bytes + work.cache_bytes(slots, grid.max_length) > memory_bytes:
            return
        step = cost.seconds(Call.of_step(slots, span))
        mesh, devices = work.layout.mesh, work.layout.mesh.num_devices
        yield Tradeoff(work.layout.name, str(mesh), devices, slots, step, slots / step)
        slots *= 2


def _is_best(one: Tradeoff, others: Sequence[Tradeoff]) -> bool:
    return not any(
        other.step_seconds <= one.step_seconds
        and other.per_device >= one.per_device
        and (other.step_seconds, other.per_device) != (one.step_seconds, one.per_device)
        for other in others
    )
