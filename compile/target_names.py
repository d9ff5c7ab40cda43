"""Names of targets, parsed without looking for devices.

`cpu`, `gpu` and `tpu` are devices of this machine, and `cpu:8` is eight of them. `tpu:v5e:2x4` and
`gpu:h100:8` are kinds of hardware that need not be present. Impossible TPU slices are refused.
Knows nothing of jax, and does not know which kinds exist.
"""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

_COUNT = "[1-9][0-9]*"
_NAME = re.compile(
    rf"(?P<platform>cpu|gpu|tpu)(:(?P<count>{_COUNT}))?"
    rf"|(?P<tpu>tpu):(?P<generation>[\w.-]+):(?P<topology>{_COUNT}(x{_COUNT}){{1,2}})"
    rf"|(?P<gpu>gpu):(?P<kind>[\w.-]+):(?P<number>{_COUNT})"
)


class UnknownTarget(ValueError):
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
        """Parse a name; raises UnknownTarget if it is none."""
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
        return cls(platform, kind, sizes)

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    @property
    def torus(self) -> tuple[int, ...]:
        """Dimensions of the interconnect; empty if it is a switch, or unknown."""
        return self.shape if self.kind and self.platform == "tpu" else ()


def _check_slice(generation: str, sizes: tuple[int, ...]) -> None:
    """Refuse a slice that chips cannot form; UnknownTarget names the nearest possible slices.

    Chips come in blocks of 2x2x1. A slice that is one chip wide has part of a block. libtpu 0.0.52
    accepts slices of any generation whose first two dimensions are 1 or even, and calls others "not
    divisible by the given (or default) chips_per_host_bounds".
    """
    if all(size == 1 or size % 2 == 0 for size in sizes[:2]):
        return
    # published slices are 1, 2 or a multiple of 4 chips long (docs.cloud.google.com/tpu/docs/v4,
    # v5e, v5p and v6e)
    smaller = (size if size < 3 else max(2, size // 4 * 4) for size in sizes)
    larger = (size if size < 3 else -(-size // 4) * 4 for size in sizes)
    raise UnknownTarget(
        f"target: expected a slice of whole blocks of 2x2 chips, so 1 or an even number along "
        f"the first two dimensions, got {_slice(generation, sizes)}. Ask for "
        f"{_slice(generation, smaller)} or {_slice(generation, larger)}."
    )


def _slice(generation: str, sizes: Iterable[int]) -> str:
    return f"tpu:{generation}:{'x'.join(map(str, sizes))}"
