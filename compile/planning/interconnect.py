"""Seconds of collectives over the links between devices: those of a slice of TPUs, or a switch.

Along a dimension whose links wrap the devices of a slice are a ring, elsewhere an open line. A mesh
axis lies along whole dimensions and parts of them, and a part is an open line too. Links count as
if nothing else were sent over them, so the outer one of two axes that share a dimension is slower
than this; and a collective as if it took no time of its own.

Knows nothing of models or graphs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .hardware import Hardware


@dataclass(frozen=True)
class Line:
    """Devices side by side along one dimension of a slice."""

    size: int
    is_ring: bool

    @property
    def links(self) -> int:
        """That each device sends over at once; an end of an open line has one."""
        return 2 if self.is_ring else 1

    @property
    def middle(self) -> float:
        """Of an all-to-all, what a link in the middle carries, in arrays of one device.

        Each of n / 2 devices sends an n-th of its array to each of the n / 2 beyond the middle:
        n / 4 arrays over one link, of a ring over two. On a ring pieces go n / 4 hops in the mean,
        so all links carry as much: V / (4 W), if V is the array of all devices and W the rate of
        two links ("How to Scale Your Model", jax-ml.github.io/scaling-book, part 3, all-to-all).
        """
        return self.size**2 // 4 / self.size / self.links


class Interconnect:
    """Links of one kind of hardware along the axes of a mesh."""

    def __init__(self, hardware: Hardware, mesh: Mapping[str, int], torus: Sequence[int]):
        """`torus` are the dimensions of the slice; without them there is a switch."""
        self.hardware = hardware
        self._dimensions = list(zip(torus, hardware.rings(torus), strict=True))
        self._along = _along(mesh, torus)

    def lines(self, mesh_axes: Iterable[str]) -> list[Line]:
        """Those that make up what the mesh axes span together."""
        sizes = map(math.prod, zip(*(self._along[axis] for axis in mesh_axes), strict=True))
        return [
            Line(size, wraps and size == whole)
            for size, (whole, wraps) in zip(sizes, self._dimensions, strict=True)
            if size > 1
        ]

    def seconds(self, kind: str, mesh_axes: Sequence[str], sent: float) -> float:
        """Of collectives for which each device sends so many bytes (`sent_bytes`).

        They share the links of a device evenly, but for an all-to-all: its pieces go along one
        dimension after the other, so it takes as long as the dimension that takes longest.
        """
        lines = self.lines(mesh_axes)
        if not lines:
            return sent / self.hardware.link_rate
        if kind == "all-to-all":
            group = math.prod(line.size for line in lines)
            array = sent * group / (group - 1)
            return array * max(line.middle for line in lines) / self.hardware.link_rate
        return sent / (self.hardware.link_rate * sum(line.links for line in lines))


def _along(mesh: Mapping[str, int], dimensions: Sequence[int]) -> dict[str, list[int]]:
    """By mesh axis, its devices along each dimension, as if these were numbered first to last.

    The last axis takes the first dimensions: of 8 by 8 devices on 4x4x4 it lies along 4, 2 and 1 of
    them, and the other axis along 1, 2 and 4.
    """
    found: dict[str, list[int]] = {}
    left = list(dimensions)
    for axis, size in reversed(list(mesh.items())):
        found[axis] = []
        for dimension, free in enumerate(left):
            taken = math.gcd(size, free)
            found[axis].append(taken)
            size //= taken
            left[dimension] //= taken
    return found
