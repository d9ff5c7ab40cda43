"""Peaks of hardware and what programs reach of them, from a table with the source of every figure.

Users can add tables. Knows nothing of models or graphs, and queries no device, so the hardware need
not be present.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...modelzoo.errors import UserError
from ..plan_tables import check_keys, check_number, check_text
from ..target_names import TargetName
from .efficiency import AT_PEAKS, Efficiency

_NUMBERS = ("memory_bytes", "memory_rate", "link_rate")


class UnknownHardware(UserError):
    """A target whose peaks are in no table."""


@dataclass(frozen=True)
class Hardware:
    """Peaks of one device, in operations, bytes, and bytes per second."""

    name: str
    """The name of the table, as targets spell it: `v5e`, `h100`, `cpu`."""
    source: str
    """The publication of the figures."""
    flops: Mapping[str, float]
    """The peak of matrix products, by the dtype of the operands. Unit: operations a second."""
    memory_bytes: float
    """The size of main memory. Unit: bytes."""
    memory_rate: float
    """The peak of reading and writing main memory. Unit: bytes a second."""
    link_rate: float
    """The peak of sending to one neighbour, in one direction. Unit: bytes a second."""
    wraps: list[int]
    """The sides of the smallest block of devices whose links wrap around: `[16]`, `[4, 4, 4]`, or
    `[]` for devices on a switch. Unit: devices."""
    weight_passes: int = 1
    """The number of times that a product reads or writes its weights. It is more than 1 where
    libraries first copy a weight into another memory order, as on CPUs. Unit: passes."""
    clock: float | None = None
    """The clock of the cores, if the compiler reports cycles. Unit: cycles a second."""
    price_per_hour: float | None = None
    """The price of one device, for the price of a job. Unit: any currency an hour."""
    efficiency: Efficiency = AT_PEAKS
    """The shares of the peaks that programs reach, and the seconds beside them."""

    def __post_init__(self):
        numbers = {f"flops.{dtype}": rate for dtype, rate in self.flops.items()}
        numbers |= {name: getattr(self, name) for name in _NUMBERS}
        for name in ("clock", "price_per_hour"):
            if getattr(self, name) is not None:
                numbers[name] = getattr(self, name)
        for name, number in numbers.items():
            check_number(f"hardware {self.name}.{name}", number, above=0)
        if (
            not isinstance(self.wraps, list)
            or any(type(side) is not int or side <= 1 for side in self.wraps)
            or len(set(self.wraps)) > 1
        ):
            raise UserError(
                f"hardware {self.name}.wraps: expected the sides of a block of devices, all alike, "
                f"as [16] or [4, 4, 4], or [] for a switch, got {self.wraps!r}."
            )
        if type(self.weight_passes) is not int or self.weight_passes < 1:
            raise UserError(
                f"hardware {self.name}.weight_passes: expected an integer of at least 1, got "
                f"{self.weight_passes!r}."
            )
        check_text(f"hardware {self.name}.source", self.source)
        if not self.flops:
            raise UserError(
                f"hardware {self.name}.flops: expected a rate for at least one dtype, got none."
            )

    def rings(self, dimensions: Sequence[int]) -> list[bool]:
        """Whether links wrap, for each dimension of a slice.

        The dimension must be a multiple of the block's side, and the slice must have as many such
        dimensions as the block has. So with `[16]` each dimension wraps by itself, but with
        `[4, 4, 4]` links wrap only if the slice consists of whole cubes.
        """
        whole = [any(size % side == 0 for side in self.wraps) for size in dimensions]
        return [is_whole and sum(whole) >= len(self.wraps) for is_whole in whole]

    def peak(self, dtype: str) -> float:
        """Operations per second of products of a dtype."""
        if dtype not in self.flops:
            raise UserError(
                f"hardware {self.name}: expected a rate for {dtype}, got {sorted(self.flops)}. "
                f"Add flops.{dtype} to a hardware table of your own."
            )
        return self.flops[dtype]

    def shared_by(self, count: int) -> "Hardware":
        """One of `count` equal parts of this device."""
        return replace(
            self,
            flops={dtype: rate / count for dtype, rate in self.flops.items()},
            memory_bytes=self.memory_bytes / count,
            memory_rate=self.memory_rate / count,
            link_rate=self.link_rate / count,
        )

    @property
    def evidence(self) -> str:
        """The evidence of seconds that are predicted for this device without a calibration."""
        if self.source.startswith("assumed"):
            return "assumed peaks"
        return self.efficiency.describe()

    def peaks(self) -> dict[str, Any]:
        """The table of the peaks alone, without the name."""
        return {
            key: value
            for key, value in asdict(replace(self, efficiency=AT_PEAKS)).items()
            if key not in ("name", "efficiency")
            and value is not None
            and (key, value) != ("weight_passes", 1)
        }

    def to_table(self) -> dict[str, Any]:
        """The table that `read_hardware` reads, without the name."""
        table = self.peaks()
        if self.efficiency != AT_PEAKS:
            table["efficiency"] = self.efficiency.to_table()
        return table


def read_hardware(tables: Mapping[str, Any]) -> dict[str, Hardware]:
    """Read parsed TOML, one table for each device; ValueError names a wrong or missing key."""
    hardware = {}
    for name, table in tables.items():
        check_keys(
            f"hardware [{name}]",
            table,
            {"source", "flops", "wraps", *_NUMBERS},
            {"clock", "weight_passes", "price_per_hour", "efficiency"},
        )
        if not isinstance(table["flops"], Mapping):
            raise UserError(
                f"hardware {name}.flops: expected a table by dtype, got {table['flops']!r}."
            )
        values = dict(table)
        if "efficiency" in table:
            where = f"hardware {name}.efficiency"
            values["efficiency"] = Efficiency.from_table(where, table["efficiency"])
        hardware[name] = Hardware(name, **values)
    return hardware


def hardware_of(target: str, known: Mapping[str, Hardware], kind: str = "") -> Hardware:
    """The hardware of one device of a target.

    Args:
      target: A target's name, such as `cpu:8` or `tpu:v5e:2x4`. Simulated devices of the CPU share
        its peaks.
      known: Hardware by name.
      kind: Kind of this machine's accelerators, for a target such as `gpu:8` that does not name it.

    Raises:
      UnknownHardware: The kind is missing, given twice, or in no table.
    """
    parsed = TargetName.parse(target)
    is_cpu = parsed.platform == "cpu"
    named = "cpu" if is_cpu else parsed.kind
    if named and kind:
        raise UnknownHardware(
            f"target {target}: expected no other kind, as the target names {named}, got {kind!r}."
        )
    name = named or kind
    if not name:
        raise UnknownHardware(
            f"target {target}: expected a kind of hardware, because predictions need "
            f"its peaks, got a target without one. Name the generation: in a plan's target, as in "
            f"tpu:v5e:2x4 or gpu:h100:8; for noria bench, as in --kind h100."
        )
    if name not in known:
        raise UnknownHardware(
            f"target {target}: expected hardware of {', '.join(known)}, got {name!r}. Name one of "
            f"them, or add a table [{name}] of your own with --hardware FILE."
        )
    device = known[name]
    return device.shared_by(parsed.num_devices) if is_cpu else device
