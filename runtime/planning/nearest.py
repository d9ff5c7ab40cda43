"""The nearest plan that fits, where weights and smallest cache do not: shorter rows, more devices.

Fewer slots are no way out, as the smallest cache has the fewest that the layout divides.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from ...compile.grids.grid_defaults import GridDefaults
from ...sharding.layout import Layout
from ...sharding.mesh_layout import MeshLayout
from .layout_ranking import RankedLayout, Ranking

GIGABYTE = 1e9
MOST_DEVICES = 4096
LAYOUTS_TRIED = 3
"""Of those that need least, on more devices."""


def nearest(ranking: Ranking, refused: Sequence[RankedLayout]) -> str:
    """What would fit, in words; empty where memory is not what is lacking."""
    allowed = ranking.budget.memory_bytes
    over = [one for one in refused if one.least_bytes is not None and one.least_bytes > allowed]
    over.sort(key=lambda one: one.least_bytes or 0)
    if not over:
        return ""
    layouts = [one.layout for one in over[:LAYOUTS_TRIED] if one.layout is not None]
    found = [_shorter_rows(ranking, over[0]), _more_devices(ranking, layouts)]
    return (
        " The nearest that fits: "
        + (", or ".join(filter(None, found)) or "none under these layouts")
        + "."
    )


def _shorter_rows(ranking: Ranking, one: RankedLayout) -> str | None:
    """The longest rows that fit beside the weights, where any do."""
    assert one.cost is not None and one.longest is not None
    work, defaults = one.cost.work, GridDefaults.for_layout(one.layout)
    free = ranking.budget.memory_bytes - work.parameter_bytes
    slots, step = defaults.slot_multiple, defaults.span_multiple
    fitting, too_long = 0, one.longest // step + 1
    while too_long - fitting > 1:
        middle = (fitting + too_long) // 2
        if work.cache_bytes(slots, middle * step) <= free:
            fitting = middle
        else:
            too_long = middle
    if not fitting:
        return None
    return f"rows of at most {fitting * step} tokens in place of {one.longest}, {slots} at a time"


def _more_devices(ranking: Ranking, layouts: Sequence[Layout]) -> str | None:
    """The least doubling of the devices at which one of the layouts has a mesh that fits."""
    count = 2 * ranking.num_devices
    while layouts and count <= MOST_DEVICES:
        meshed = [
            layout.with_mesh(mesh) for layout in layouts for mesh in meshes_of(layout.mesh, count)
        ]
        ranked = replace(ranking, num_devices=count, torus=()).rank(meshed)
        fitting = [one for one in ranked if one.bound is not None]
        if fitting:
            best = min(fitting, key=lambda one: one.least_bytes or 0)
            assert best.layout is not None and best.least_bytes is not None
            return (
                f"{count} devices in place of {ranking.num_devices} ({best.layout.name}, "
                f"{best.layout.mesh}: {best.least_bytes / GIGABYTE:.2f} GB a device)"
            )
        count *= 2
    return None


def meshes_of(mesh: MeshLayout, count: int) -> Iterator[MeshLayout]:
    """Meshes of so many devices with the same axes; those of size 1 stay."""
    wide = MeshLayout(tuple((name, size) for name, size in mesh.axes if size > 1))
    for fitted in wide.all_fitted(count):
        yield MeshLayout.from_table({name: fitted.sizes.get(name, 1) for name, _ in mesh.axes})
