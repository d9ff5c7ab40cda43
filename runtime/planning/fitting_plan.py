"""Suggest a plan that fits, if weights and the smallest cache do not: shorter rows, more devices.

Fewer slots do not help: the smallest cache has the smallest number of slots that the layout can
divide.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...compile.grids.grid_defaults import GridDefaults
from ...sharding.layout import Layout
from ...sharding.mesh_layout import MeshLayout
from .layout_ranking import RankedLayout, Ranking

GIGABYTE = 1e9
MAX_DEVICES = 4096
NUM_LAYOUTS_TRIED = 3
"""The number of layouts, those with the smallest need of memory, that are tried on more devices."""


def suggest_fitting_plan(ranking: Ranking, refused: Sequence[RankedLayout]) -> str:
    """A sentence on what would fit; empty if no layout was refused for lack of memory."""
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
    work, defaults = ranked.cost.work, GridDefaults.for_layout(ranked.layout)
    free = ranking.budget.memory_bytes - work.parameter_bytes
    slots, step = defaults.slot_multiple, defaults.span_multiple
    fitting, too_long = 0, ranked.max_row_length // step + 1
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        if work.cache_bytes(slots, middle * step) <= free:
            fitting = middle
        else:
            too_long = middle
    if not fitting:
        return None
    return (
        f"rows of at most {fitting * step} tokens instead of {ranked.max_row_length}, "
        f"{slots} at a time"
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
