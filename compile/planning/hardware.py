"""Peaks of hardware, from a table that names the source of every figure; users add their own.

Knows nothing of models or graphs, and asks no device: the hardware need not be there.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..plan_tables import check_keys

PLATFORMS = ("cpu", "gpu", "tpu")
_NUMBERS = ("memory_bytes", "memory_rate", "link_rate", "links")


class UnknownHardware(ValueError):
    """A target whose peaks no table has."""


@dataclass(frozen=True)
class Hardware:
    """Peaks of one device, in operations, bytes, and bytes a second."""

    name: str
    source: str
    """Where the figures are from."""
    flops: Mapping[str, float]
    """Of matrix products, by the operands' dtype."""
    memory_bytes: float
    memory_rate: float
    link_rate: float
    """To one neighbour, in one direction."""
    links: int
    """Neighbours at once: two a torus dimension, or one switch."""

    def __post_init__(self):
        numbers = {f"flops.{dtype}": rate for dtype, rate in self.flops.items()}
        numbers |= {name: getattr(self, name) for name in _NUMBERS}
        for name, number in numbers.items():
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not (is_number and math.isfinite(number) and number > 0):
                raise ValueError(
                    f"hardware {self.name}.{name}: expected a number above 0, got {number!r}."
                )
        if not self.flops:
            raise ValueError(
                f"hardware {self.name}.flops: expected a rate for at least one dtype, got none."
            )

    def rate(self, rings: int = 1) -> float:
        """Bytes a second that a device sends along a mesh axis of so many dimensions of a torus.

        A ring in a torus sends both ways round; a switch has one way out.
        """
        return self.link_rate * min(2 * rings, self.links)

    def peak(self, dtype: str) -> float:
        """Operations a second of products of that dtype."""
        if dtype not in self.flops:
            raise ValueError(
                f"hardware {self.name}: expected a rate for {dtype}, got {sorted(self.flops)}. "
                f"Add flops.{dtype} to a hardware table of your own."
            )
        return self.flops[dtype]

    def shared_by(self, count: int) -> "Hardware":
        """One of so many devices that are parts of this one."""
        return replace(
            self,
            flops={dtype: rate / count for dtype, rate in self.flops.items()},
            memory_bytes=self.memory_bytes / count,
            memory_rate=self.memory_rate / count,
            link_rate=self.link_rate / count,
        )

    def to_table(self) -> dict[str, Any]:
        """What `read_hardware` reads, without the name."""
        table = asdict(self)
        del table["name"]
        return table


def read_hardware(tables: Mapping[str, Any]) -> dict[str, Hardware]:
    """Parsed TOML, one table a device; ValueError names a key that is wrong or missing."""
    found = {}
    for name, table in tables.items():
        check_keys(f"hardware [{name}]", table, {"source", "flops", *_NUMBERS})
        if not isinstance(table["flops"], Mapping):
            raise ValueError(
                f"hardware {name}.flops: expected a table by dtype, got {table['flops']!r}."
            )
        found[name] = Hardware(name, **table)
    return found


def num_devices(target: str) -> int:
    """Devices of a target by its name alone: `cpu:8`, `tpu:v5e:2x4`, `gpu:h100:8`."""
    platform, _, rest = target.partition(":")
    is_count = platform == "cpu" or rest.isdecimal()
    shape = rest if is_count else rest.partition(":")[2]
    sizes = [shape] if is_count and shape else shape.split("x") if shape else ["1"]
    if not all(size.isascii() and size.isdigit() and int(size) > 0 for size in sizes):
        raise UnknownHardware(
            f"target {target}: expected cpu:8, tpu:v5e:2x4, gpu:h100:8 or the like, got {shape!r} "
            f"for its devices."
        )
    return math.prod(map(int, sizes))


def torus(target: str) -> tuple[int, ...]:
    """Dimensions of a target's interconnect; none where it is a switch, or not known."""
    platform, _, rest = target.partition(":")
    shape = rest.partition(":")[2]
    return tuple(map(int, shape.split("x"))) if platform == "tpu" and shape else ()


def rings(mesh: Mapping[str, int], dimensions: Sequence[int]) -> dict[str, int]:
    """By mesh axis: dimensions of a torus that it spans whole, at least one.

    The last mesh axis has the first dimensions, as devices are numbered. On 4x4x4, 4 by 16 devices
    are rings of 4 beside planes of 4x4, which send along both of their dimensions at once.
    """
    found, left = {}, [size for size in dimensions if size > 1]
    for axis, size in reversed(list(mesh.items())):
        whole = 0
        while left and size > 1 and size % left[0] == 0:
            size //= left.pop(0)
            whole += 1
        if left and size > 1:
            # a part of a dimension is no ring of its own; what is left of it is for the next axis
            left[0] = max(1, left[0] // size)
        found[axis] = max(1, whole)
    return found


def hardware_of(target: str, known: Mapping[str, Hardware]) -> Hardware:
    """One device of a target: its platform's (`cpu:8`) or its generation's (`tpu:v5e:2x4`).

    Devices of the CPU are simulated: they share what there is.
    """
    platform, _, rest = target.partition(":")
    name = platform if platform == "cpu" else rest.partition(":")[0]
    if platform not in PLATFORMS or name not in known:
        raise UnknownHardware(
            f"target {target}: expected hardware of {', '.join(known)}, got {name!r}. Name the "
            f"generation (tpu:v5e:2x4, gpu:h100:8), or add a table [{name}] of your own with "
            f"--hardware FILE."
        )
    device = known[name]
    return device.shared_by(num_devices(target)) if platform == "cpu" else device
