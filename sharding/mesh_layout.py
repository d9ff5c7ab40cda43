"""The shape of a device mesh: named axes and their sizes, major to minor in device order.

Knows nothing of models, rules or files.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh

MESH_AXES = ("data", "sequence", "tensor", "expert")


@dataclass(frozen=True)
class MeshLayout:
    """Axis names with sizes, in device order. A size may be any integer until it is checked."""

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def from_table(cls, sizes: Mapping[str, int]) -> "MeshLayout":
        """Read a table such as `{"data": 2, "tensor": 4}`; the order counts."""
        return cls(tuple(sizes.items()))

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self.axes)

    @property
    def num_devices(self) -> int:
        return math.prod(size for _, size in self.axes)

    def num_shards(self, mesh_axes: Iterable[str]) -> int:
        """Number of pieces into which these mesh axes split a dimension."""
        sizes = self.sizes
        return math.prod(sizes[axis] for axis in mesh_axes)

    def fitted(self, num_devices: int) -> "MeshLayout":
        """Mesh of `num_devices` with the same axes and the proportions nearest to these sizes."""
        names, wanted = zip(*self.axes, strict=True)

        def distance(sizes: tuple[int, ...]) -> tuple[float, int]:
            # only the proportions count: the number of devices is given
            ratios = [math.log(size / aim) for size, aim in zip(sizes, wanted, strict=True)]
            mean = sum(ratios) / len(ratios)
            # among equally near sizes, prefer those with the smallest maximum
            return round(sum((ratio - mean) ** 2 for ratio in ratios), 9), max(sizes)

        sizes = min(_factorisations(num_devices, len(names)), key=distance)
        return MeshLayout(tuple(zip(names, sizes, strict=True)))

    def all_fitted(self, num_devices: int) -> "list[MeshLayout]":
        """Meshes of `num_devices` with the same axes, for every choice of sizes above 1."""
        names = [name for name, _ in self.axes]
        return [
            MeshLayout(tuple(zip(names, sizes, strict=True)))
            for sizes in _factorisations(num_devices, len(names))
            if min(sizes) > 1
        ]

    def build(self, devices: Sequence[Any]) -> Mesh:
        """Build a mesh of exactly these devices.

        With `AxisType.Auto`, XLA decides about axes that no rule names.
        """
        names, sizes = zip(*self.axes, strict=True)
        array = np.array(devices).reshape(sizes)
        return Mesh(array, names, axis_types=(AxisType.Auto,) * len(names))

    def __str__(self) -> str:
        return ", ".join(f"{axis}={size}" for axis, size in self.axes)


def _factorisations(number: int, count: int) -> list[tuple[int, ...]]:
    """All products of `count` factors that equal a number, in every order."""
    if count == 1:
        return [(number,)]
    return [
        (factor, *rest)
        for factor in _divisors(number)
        for rest in _factorisations(number // factor, count - 1)
    ]


def _divisors(number: int) -> list[int]:
    """All divisors, in order; each beyond the square root is the quotient of one below it."""
    small = [factor for factor in range(1, math.isqrt(number) + 1) if number % factor == 0]
    return sorted({*small, *(number // factor for factor in small)})
