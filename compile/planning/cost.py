"""Predicted seconds of a graph's call: work of its parts over peaks, corrected by evidence.

A part takes the longer of its products' time and its memory's time, plus the time of its
communication (the roofline: Williams, Waterman, Patterson 2009, "Roofline: An Insightful Visual
Performance Model", doi:10.1145/1498765.1498785). Where products first copy their weights into
another layout, the time of the copies is added. Parts run one after the other. Two kinds of
evidence correct this. The hardware's efficiency divides each part by the share of the roofline that
it reaches, and adds the seconds of calls, steps and layers (`efficiency`). A calibration for one
model takes the place of the efficiency. It scales the memory's time before it is compared with the
products' time, multiplies each part by a factor, and adds seconds to every call.

Knows nothing of grids or schedules. Every figure here is a prediction.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import nnls

from ...modelzoo.errors import UserError
from ...sharding.call import KINDS, Call
from ..hardware.efficiency import PAGES
from ..hardware.hardware import Hardware
from ..hardware.interconnect import Interconnect
from ..plan_tables import check_keys, check_number
from .compile_time import first_call_seconds
from .work import Part, Sent, Work, sum_by_key

PAGES_ASSUMED = "reads of pages assumed"
"""The evidence of a plan with pages, if no read of pages was measured."""
BINDS = ("compute", "memory", "network", "overhead")
LIMITS = {
    "products": "compute",
    "attention": "compute",
    "weights": "memory",
    "cache": "memory",
    "activations": "memory",
    "calls": "overhead",
}
"""The limit of each cause of seconds. Any other cause is a collective, which waits for the network.
"""
MEMORY_FACTORS = tuple(sorted(map(float, 2 ** np.linspace(-3, 3, 13)), key=lambda x: abs(x - 1)))
"""Memory factors that a fit tries, as the peaks of an unmeasured machine may be this wrong."""


@dataclass(frozen=True)
class KindFactors:
    """Corrections of the roofline for calls of one kind."""

    overhead: float = 0.0
    """Seconds added to every call; for decode, to every step."""
    first_call: float = 0.0
    """Extra seconds of the first call of a graph."""
    memory: float = 1.0
    """Factor of the memory's time, applied before it is compared with the products' time."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Factors of parts by name; 1 for any other part."""


@dataclass(frozen=True)
class Calibration:
    """Measured corrections for a model on a machine."""

    model: str
    """Fingerprint of the model's files."""
    dtype: str
    hardware: Mapping[str, Any]
    """Name and peaks of the hardware to which the factors apply."""
    layout: str
    """The layout as the user gave it; empty for one device."""
    kinds: Mapping[str, KindFactors]
    median_error: float
    """Median relative error of the fit over its calls."""
    machine: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The table that `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> "Calibration":
        """Read a calibration; ValueError names a wrong or missing key."""
        check_keys("calibration", table, set(cls.__dataclass_fields__))
        check_keys("calibration kinds", table["kinds"], set(KINDS))
        for kind, factor_table in table["kinds"].items():
            check_keys(
                f"calibration kinds.{kind}", factor_table, set(KindFactors.__dataclass_fields__)
            )
            if not isinstance(factors := factor_table["factors"], Mapping):
                raise UserError(f"calibration kinds.{kind}.factors: expected a table.")
            for name, value in {**factor_table, **factors}.items():
                if name != "factors":
                    check_number(f"calibration kinds.{kind}.{name}", value)
        check_number("calibration median_error", table["median_error"])
        kinds = {kind: KindFactors(**factor_table) for kind, factor_table in table["kinds"].items()}
        return cls(**{**table, "kinds": kinds})


@dataclass(frozen=True)
class Estimate:
    """Predicted seconds of one call."""

    parts: Mapping[str, float]
    """Seconds by name of the part, and `overhead`."""
    causes: Mapping[str, float]
    """The same seconds by cause: a key of `LIMITS`, or a collective and its mesh axes."""

    @cached_property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @cached_property
    def limits(self) -> Mapping[str, float]:
        """The same seconds by what limits them, one of `BINDS`."""
        by_cause = ((LIMITS.get(cause, "network"), s) for cause, s in self.causes.items())
        return {**dict.fromkeys(BINDS, 0.0), **sum_by_key(by_cause)}

    @property
    def binds(self) -> str:
        """The limit that takes most of the time."""
        return max(self.limits, key=lambda name: self.limits[name])


class CostModel:
    """Predicted seconds of calls of one model under a layout, on one kind of hardware."""

    def __init__(
        self,
        work: Work,
        hardware: Hardware,
        calibration: Calibration | None = None,
        torus: Sequence[int] = (),
    ):
        """Create a cost model; `torus` is the shape of the interconnect, empty for a switch."""
        self.work, self.hardware, self.calibration = work, hardware, calibration
        self.torus = torus
        self._interconnect = Interconnect(hardware, work.layout.mesh.sizes, torus)
        self._peak = hardware.peak(work.dtype)
        self._known: dict[Call, Estimate] = {}

    def first_call_seconds(self, call: Call) -> float:
        """Extra seconds of the first call of a graph.

        Without a calibration they are the platform's.
        """
        if self.calibration is not None:
            return self.calibration.kinds[call.phase].first_call
        return first_call_seconds(self.hardware.name, self.work.num_program_layers)

    @property
    def evidence(self) -> str:
        """The evidence of the seconds, as `measured h200, jax 0.11.2` or `calibration`."""
        return self.hardware.evidence if self.calibration is None else "calibration"

    def evidence_of(self, file: str = "", *, has_pages: bool) -> str:
        """The evidence of the seconds of a grid, with or without pages.

        Args:
          file: The name of the calibration's file; empty without one.
          has_pages: Whether the grid has pages.
        """
        evidence = f"{self.evidence} {file}".rstrip()
        is_assumed = self.calibration is not None or not self.hardware.efficiency.has_pages
        return f"{evidence}, {PAGES_ASSUMED}" if has_pages and is_assumed else evidence

    def seconds(self, call: Call) -> float:
        """Seconds of one call; for decode, of one step."""
        return self.estimate(call).seconds

    def decode_call_seconds(self) -> float:
        """Seconds of a decode call in addition to its steps."""
        return self.hardware.efficiency.call_seconds if self.calibration is None else 0.0

    def estimate(self, call: Call) -> Estimate:
        """Seconds of a call, by part and by cause."""
        if call not in self._known:
            if self.calibration is None:
                self._known[call] = self._by_efficiency(call)
            else:
                factors = self.calibration.kinds.get(call.phase, KindFactors())
                self._known[call] = self.estimate_with(factors, call)
        return self._known[call]

    def roofline(
        self, flops: float, num_bytes: float, sent: Sent, int8_flops: float = 0.0
    ) -> float:
        """Seconds of this work as one part, by peaks alone."""
        part = Part("all", flops, int8_flops, num_bytes, sent=sent)
        return self._local(part, KindFactors())[0] + sum(self._collectives(part).values())

    def _by_efficiency(self, call: Call) -> Estimate:
        """Seconds of a call by the efficiency of the hardware, by part and by cause."""
        efficiency = self.hardware.efficiency
        parts: dict[str, float] = {}
        causes: dict[str, float] = {}
        kind = PAGES if call.page else call.phase
        for part in self.work.parts(call):
            local, limit = self._local(part, KindFactors())
            dtype = "int8" if part.int8_flops else self.work.dtype
            local /= efficiency.share(part.name, kind, dtype, part.rows)
            extra_bytes = part.elements * efficiency.extra_bytes(part.name, kind)
            extra = extra_bytes / self.hardware.memory_rate
            of_part = _by_cause(part, limit, local, self._collectives(part))
            # scores and logits that are written out and read again
            of_part.append(("activations", extra))
            parts[part.name] = sum(seconds for _, seconds in of_part)
            causes = sum_by_key((*causes.items(), *of_part))
        of_call = efficiency.call_seconds
        if call.phase == "decode":
            of_call = efficiency.step_seconds
        overhead = of_call + self.work.config.num_layers * efficiency.layer_seconds
        if overhead:
            parts["overhead"] = causes["calls"] = overhead
        return Estimate(parts, causes)

    def estimate_with(self, kind_factors: KindFactors, call: Call) -> Estimate:
        """Seconds of a call with these corrections, by part and by cause."""
        parts: dict[str, float] = {}
        causes: dict[str, float] = {}
        for part in self.work.parts(call):
            factor = kind_factors.factors.get(part.name, 1.0)
            local, limit = self._local(part, kind_factors)
            of_part = [
                (cause, factor * seconds)
                for cause, seconds in _by_cause(part, limit, local, self._collectives(part))
            ]
            parts[part.name] = sum(seconds for _, seconds in of_part)
            causes = sum_by_key((*causes.items(), *of_part))
        if kind_factors.overhead:
            parts["overhead"] = causes["calls"] = kind_factors.overhead
        return Estimate(parts, causes)

    def _collectives(self, part: Part) -> dict[str, float]:
        """Seconds of a part's communication, by collective."""
        seconds = self._interconnect.seconds
        return {
            f"{kind} along {'+'.join(axes)}": seconds(kind, axes, sent)
            for (kind, axes), sent in part.sent.items()
        }

    def _local(self, part: Part, kind_factors: KindFactors) -> tuple[float, str]:
        """Seconds of a part on its device before its own factor, and their limit."""
        compute = (part.flops - part.int8_flops) / self._peak
        if part.int8_flops:
            compute += part.int8_flops / self.hardware.peak("int8")
        byte_seconds = kind_factors.memory / self.hardware.memory_rate
        memory = byte_seconds * part.bytes
        copies = byte_seconds * part.weight_bytes * (self.hardware.weight_passes - 1)
        limit = "compute" if compute >= memory else "memory"
        return max(compute, memory) + copies, limit


def _by_cause(
    part: Part, limit: str, local: float, collectives: Mapping[str, float]
) -> list[tuple[str, float]]:
    """The seconds of a part by cause: those on its device, and those of its collectives."""
    cause = part.name
    if part.name == "attention" and limit == "memory":
        cause = "cache"
    elif part.name in ("products", "experts", "logits"):
        cause = "products" if limit == "compute" else "weights"
    elif not (part.flops or part.bytes):
        return list(collectives.items())
    return [(cause, local), *collectives.items()]


@dataclass(frozen=True)
class CallTiming:
    """A call and its measured seconds; for decode, of one step."""

    call: Call
    seconds: float
    first_call: float | None = None
    """Extra seconds of the graph's first call; None if it was not timed."""


def calibrate(
    work: Work,
    hardware: Hardware,
    measured: Sequence[CallTiming],
    **about: Any,
) -> Calibration:
    """Fit the corrections with the least squared relative error.

    Args:
      work: The work of the model under a layout.
      hardware: The peaks to correct.
      measured: Measured calls of every kind.
      **about: The other fields of the calibration.

    Raises:
      ValueError: There is no measured call of some kind.
    """
    model = CostModel(work, hardware)
    kinds, errors = {}, []
    for kind in KINDS:
        samples = [sample for sample in measured if sample.call.phase == kind]
        if not samples:
            raise UserError(f"calibration: expected measured calls of {kind}, got none.")
        fits = [_fit(model, samples, memory) for memory in MEMORY_FACTORS]
        # factor 1, which leaves the peak as it is, comes first and wins among equally good fits
        kinds[kind], relative_errors = min(
            fits, key=lambda fit: round(float(np.square(fit[1]).mean()), 9)
        )
        errors += list(abs(relative_errors))
    return Calibration(
        kinds=kinds,
        median_error=float(np.median(errors)),
        dtype=work.dtype,
        hardware={"name": hardware.name, **hardware.peaks()},
        **about,
    )


def _fit(
    model: CostModel, samples: Sequence[CallTiming], memory: float
) -> tuple[KindFactors, np.ndarray]:
    """Corrections, none below 0 (Lawson and Hanson 1974, ch. 23), and their relative errors."""
    raw = KindFactors(memory=memory)
    rows = [model.estimate_with(raw, sample.call).parts for sample in samples]
    names = list(rows[0])
    seconds = np.array([sample.seconds for sample in samples])
    features = np.array([[1.0, *(row[name] for name in names)] for row in rows])
    relative = features / seconds[:, None]
    solution, _ = nnls(relative, np.ones(len(samples)))
    overhead, *part_factors = map(float, solution)
    first_calls = [one.first_call for one in samples if one.first_call is not None]
    first_call = max(0.0, statistics.median(first_calls or [0.0]))
    factors = KindFactors(overhead, first_call, memory, dict(zip(names, part_factors, strict=True)))
    return factors, relative @ solution - 1
