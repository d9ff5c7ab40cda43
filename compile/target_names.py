"""Names of targets: what they say of devices, before anyone looks for these.

`cpu`, `gpu` and `tpu` are this machine's, `cpu:8` eight of them; `tpu:v5e:2x4` and `gpu:h100:8` are
a kind of hardware, which need not be there. Knows neither jax nor which kinds there are.
"""

import math
import re
from dataclasses import dataclass

_COUNT = "[1-9][0-9]*"
_NAME = re.compile(
    rf"(?P<platform>cpu|gpu|tpu)(:(?P<count>{_COUNT}))?"
    rf"|(?P<tpu>tpu):(?P<generation>[\w.-]+):(?P<topology>{_COUNT}(x{_COUNT})*)"
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
                f"(tpu:v5e:2x4) or GPUs of a kind (gpu:h100:8), got {name!r}."
            )
        platform = found["platform"] or found["tpu"] or found["gpu"]
        shape = found["topology"] or found["number"] or found["count"] or "1"
        kind = found["generation"] or found["kind"] or ""
        return cls(platform, kind, tuple(map(int, shape.split("x"))))

    @property
    def num_devices(self) -> int:
        return math.prod(self.shape)

    @property
    def torus(self) -> tuple[int, ...]:
        """Dimensions of the interconnect; none where it is a switch, or not known."""
        return self.shape if self.kind and self.platform == "tpu" else ()
