"""Seconds of collectives over the links between devices, on a slice of TPUs or a switch.

Devices along a dimension of a slice form a ring if its links wrap, else an open line. A mesh axis
covers whole dimensions and parts of dimensions; a part is an open line, too. It is assumed that
nothing else uses the links, so if two axes share a dimension, the outer one is slower than
predicted here. A collective has no latency of its own.

Knows nothing of models or graphs.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from .hardware import Hardware


@dataclass(frozen=True)
class Line:
    """Neighbouring devices along one dimension of a slice."""

    size: int
    is_ring: bool

    @property
    def num_links(self) -> int:
        """Number of links over which each device sends at once; one in an open line."""
        return 2 if self.is_ring else 1

    @property
    def middle_load(self) -> float:
        """Load of a link in the middle during an all-to-all, in arrays of one device.

        Each of n / 2 devices sends an n-th of its array to each of the n / 2 devices beyond the
        middle. These are n / 4 arrays over one link, or over two links on a ring. On a ring, pieces
        travel n / 4 hops on average, so all links have the same load. An all-to-all then takes
        V / (4 W) seconds, where V is the array of all devices and W the rate of two links ("How to
        Scale Your Model", jax-ml.github.io/scaling-book, part 3, all-to-all).
        """
        return self.size**2 // 4 / self.size / self.num_links


class Interconnect:
    """Links of one kind of hardware along the axes of a mesh."""

    def __init__(self, hardware: Hardware, mesh: Mapping[str, int], torus: Sequence[int]):
        """Create an interconnect; `torus` has the dimensions of the slice, empty for a switch."""
        self.hardware = hardware
        self._dimensions = list(zip(torus, hardware.rings(torus), strict=True))
        self._along = _along(mesh, torus)

    def lines(self, mesh_axes: Iterable[str]) -> list[Line]:
        """The lines of devices that these mesh axes cover together."""
        sizes = map(math.prod, zip(*(self._along[axis] for axis in mesh_axes), strict=True))
        return [
            Line(size, wraps and size == whole)
            for size, (whole, wraps) in zip(sizes, self._dimensions, strict=True)
            if size > 1
        ]

    def seconds(self, kind: str, mesh_axes: Sequence[str], sent: float) -> float:
        """Seconds of collectives in which each device sends `sent` bytes (see `sent_bytes`).

        The bytes use all links of a device evenly, except in an all-to-all: its pieces go along one
        dimension after the other, so it takes as long as the slowest dimension.
        """
        lines = self.lines(mesh_axes)
        if not lines:
            return sent / self.hardware.link_rate
        if kind == "all-to-all":
            group = math.prod(line.size for line in lines)
            array = sent * group / (group - 1)
            return array * max(line.middle_load for line in lines) / self.hardware.link_rate
        return sent / (self.hardware.link_rate * sum(line.num_links for line in lines))


def _along(mesh: Mapping[str, int], dimensions: Sequence[int]) -> dict[str, list[int]]:
    """Number of devices of each mesh axis along each dimension, if devices are numbered in order.

    The last axis takes the first dimensions: with 8 by 8 devices on 4x4x4, it has 4, 2 and 1
    devices along the dimensions, and the other axis has 1, 2 and 4.
    """
    along: dict[str, list[int]] = {}
    left = list(dimensions)
    for axis, size in reversed(list(mesh.items())):
        along[axis] = []
        for dimension, free in enumerate(left):
            taken = math.gcd(size, free)
            along[axis].append(taken)
            size //= taken
            left[dimension] //= taken
    return along
