"""Names of targets: what they say of devices, before anyone looks for these.

`cpu`, `gpu` and `tpu` are this machine's, `cpu:8` eight of them; `tpu:v5e:2x4` and `gpu:h100:8` are
a kind of hardware, which need not be there. Slices of TPUs that cannot be are refused. Knows
neither jax nor which kinds there are.
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
    """A target that cannot be parsed or is not there."""


@dataclass(frozen=True)
class TargetName:
    """A target's name, taken apart."""

    platform: str
    kind: str = ""
    """Generation of TPUs or kind of GPUs; empty for this machine's, whatever they are."""
    shape: tuple[int, ...] = (1,)
    """Of TPUs of a generation their topology, of others their number."""

    @classmethod
    def of(cls, name: object) -> "TargetName":
        """Take a name apart; UnknownTarget where it is none."""
        found = _NAME.fullmatch(name) if isinstance(name, str) else None
        if found is None:
            raise UnknownTarget(
                f"target: expected cpu, gpu, tpu, a number of them (cpu:8), a slice of TPUs "
                f"(tpu:v5e:2x4) or GPUs of a kind (gpu:h100:8), got {name!r}. The default is "
                f"the first of JAX_PLATFORMS."
            )
        platform = found["platform"] or found["tpu"] or found["gpu"]
        shape = found["topology"] or found["number"] or found["count"] or "1"
        kind = found["generation"] or found["kind"] or ""
        sizes = tuple(map(int, shape.split("x")))
        if found["topology"]:
            _check_slice(kind, sizes)
        return cls(platform, kind, sizes)

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    @property
    def torus(self) -> tuple[int, ...]:
        """Dimensions of the interconnect; none where it is a switch, or not known."""
        return self.shape if self.kind and self.platform == "tpu" else ()


def _check_slice(generation: str, sizes: tuple[int, ...]) -> None:
    """Refuse a slice that chips cannot make up; UnknownTarget names the nearest that are.

    Chips come in blocks of 2x2x1, of which a slice one chip wide has a part: libtpu 0.0.52 takes
    slices of any generation whose first two dimensions are 1 or even, and calls others "not
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
