"""Names of targets, parsed without looking for devices.

`cpu`, `gpu` and `tpu` are devices of this machine, and `cpu:8` is eight of them. `tpu:v5e:2x4` and
`gpu:h100:8` are kinds of hardware that need not be present. Slices of TPUs and numbers of GPUs that
do not exist are refused. Kinds of which nothing is known may have a hardware table of the user.
Knows nothing of jax.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..modelzoo.errors import UserError
from .device_kinds import TPU_KINDS
from .gpu_kinds import GPU_KINDS, GPUS_PER_HOST, host_topology

_COUNT = "[1-9][0-9]*"
_NAME = re.compile(
    rf"(?P<platform>cpu|gpu|tpu)(:(?P<count>{_COUNT}))?"
    rf"|(?P<tpu>tpu):(?P<generation>[\w.-]+):(?P<topology>{_COUNT}(x{_COUNT}){{1,2}})"
    rf"|(?P<gpu>gpu):(?P<kind>[\w.-]+):(?P<number>{_COUNT})"
)


class UnknownTarget(UserError):
    """A target that cannot be parsed or is not present."""


@dataclass(frozen=True)
class TargetName:
    """The parts of a target's name."""

    platform: str
    kind: str = ""
    """TPU generation or GPU kind; empty for the devices of this machine, whatever their kind is."""
    shape: tuple[int, ...] = (1,)
    """Topology for TPUs of a generation, else the number of devices."""

    @classmethod
    def parse(cls, name: object) -> "TargetName":
        """Parse a name; raises UnknownTarget if it is none, or names hardware that cannot be."""
        match = _NAME.fullmatch(name) if isinstance(name, str) else None
        if match is None:
            raise UnknownTarget(
                f"target: expected cpu, gpu, tpu, a number of them (cpu:8), a slice of TPUs "
                f"(tpu:v5e:2x4) or GPUs of a kind (gpu:h100:8), got {name!r}. The default is "
                f"the first of JAX_PLATFORMS."
            )
        platform = match["platform"] or match["tpu"] or match["gpu"]
        shape = match["topology"] or match["number"] or match["count"] or "1"
        kind = match["generation"] or match["kind"] or ""
        sizes = tuple(map(int, shape.split("x")))
        if match["topology"]:
            _check_slice(kind, sizes)
        if match["number"]:
            _check_hosts(kind, *sizes)
        return cls(platform, kind, sizes)

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    @property
    def torus(self) -> tuple[int, ...]:
        """Dimensions of the interconnect; empty if it is a switch, or unknown."""
        return self.shape if self.kind and self.platform == "tpu" else ()


def _check_slice(generation: str, sizes: tuple[int, ...]) -> None:
    """Refuse a slice that chips cannot form; UnknownTarget names slices that they can form.

    Chips come in blocks of 2x2x1, of which libtpu refuses parts ("not divisible by the given (or
    default) chips_per_host_bounds"), except a single chip.
    """
    name = _slice(generation, sizes)
    if (kind := TPU_KINDS.get(generation)) and not kind.holds(sizes):
        raise UnknownTarget(
            f"target: expected a slice of {generation} with {kind}, got {name}. The largest is "
            f"{_slice(generation, kind.largest)}."
        )
    is_chip = all(size == 1 for size in sizes)
    if is_chip or all(size % 2 == 0 for size in sizes[:2]):
        return
    nearest = dict.fromkeys(_slice(generation, near) for near in _nearest(sizes))
    raise UnknownTarget(
        f"target: expected one chip, or a slice of whole blocks of 2x2 chips, so an even number "
        f"along the first two dimensions, got {name}. Ask for {' or '.join(nearest)}."
    )


def _nearest(sizes: tuple[int, ...]) -> Iterator[list[int]]:
    """The next smaller and the next larger slice among those that are published.

    Their sides are 1, 2 or a multiple of 4 chips long (docs.cloud.google.com/tpu/docs/v4, v5e, v5p
    and v6e). Two rows take the place of a single row with as many chips.
    """
    plane, depths = sizes[:2], sizes[2:]
    if 1 in plane:
        plane = 2, max(2, max(plane) / 2)
    for round_to in (math.floor, math.ceil):
        yield [
            int(side) if side in (1, 2) else max(2, 4 * round_to(side / 4))
            for side in (*plane, *depths)
        ]


def _check_hosts(kind: str, count: int) -> None:
    """Refuse GPUs of several hosts of which one is not full."""
    if kind in GPU_KINDS and host_topology(count) is None:
        full = count // GPUS_PER_HOST * GPUS_PER_HOST
        raise UnknownTarget(
            f"target: expected up to {GPUS_PER_HOST} GPUs, or whole hosts of {GPUS_PER_HOST}, got "
            f"gpu:{kind}:{count}. Ask for gpu:{kind}:{full} or gpu:{kind}:{full + GPUS_PER_HOST}."
        )


def _slice(generation: str, sizes: Iterable[int]) -> str:
    return f"tpu:{generation}:{'x'.join(map(str, sizes))}"
