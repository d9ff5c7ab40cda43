"""Kinds of accelerators: the names of their devices, and the sizes in which they come.

Targets and hardware tables call the kinds by the same names. Users may add hardware tables of other
kinds; nothing is known of these here. Knows nothing of jax, graphs or speeds.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .gpu_kinds import GPU_KINDS


@dataclass(frozen=True)
class TpuKind:
    """A generation of TPUs."""

    device_names: tuple[str, ...]
    """The names that its devices report."""
    largest: tuple[int, ...]
    """The largest slice; other slices have as many dimensions."""
    longest_side: int | None = None
    """The maximum along each dimension. None if optical switches join cubes of chips in any
    order, so that only the number of chips is limited."""

    def __str__(self) -> str:
        most = (
            f"{self.longest_side} chips along each" if self.longest_side else f"{self._chips} chips"
        )
        return f"{len(self.largest)} dimensions and at most {most}"

    def holds(self, slice_sizes: Sequence[int]) -> bool:
        """Whether a slice of these sizes is no larger than the largest."""
        if len(slice_sizes) != len(self.largest):
            return False
        if self.longest_side is not None:
            return max(slice_sizes) <= self.longest_side
        return math.prod(slice_sizes) <= self._chips

    @property
    def _chips(self) -> int:
        return math.prod(self.largest)


# Names: jax/_src/pallas/mosaic/tpu_info.py (chip_version_from_device_kind); libtpu 0.0.42.1 and
# 0.0.52 report the first of each kind. Slices: docs.cloud.google.com/tpu/docs/v4 (4096 chips), v5e
# and v6e (16x16), v5p (6144 chips).
TPU_KINDS = {
    "v4": TpuKind(("TPU v4",), (16, 16, 16)),
    "v5e": TpuKind(("TPU v5 lite", "TPU v5e"), (16, 16), longest_side=16),
    "v5p": TpuKind(("TPU v5", "TPU v5p"), (16, 16, 24)),
    "v6e": TpuKind(("TPU v6 lite", "TPU v6e"), (16, 16), longest_side=16),
}

_KINDS_BY_NAME = {
    name: kind
    for kind, facts in [*TPU_KINDS.items(), *GPU_KINDS.items()]
    for name in facts.device_names
}


def kind_of(devices: Iterable[Any]) -> str | None:
    """The kind of devices by the names that they report.

    None if the names differ, or belong to no kind that is known.

    >>> from types import SimpleNamespace
    >>> kind_of([SimpleNamespace(device_kind="TPU v5 lite")] * 4)
    'v5e'
    """
    names = {device.device_kind for device in devices}
    return _KINDS_BY_NAME.get(*names) if len(names) == 1 else None
