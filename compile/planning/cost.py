"""Seconds of a graph's call: the work of its parts over peaks, corrected where it was measured.

A part takes as long as its products or its memory, whichever is longer, and then what it sends
(the roofline: Williams, Waterman, Patterson 2009, "Roofline: An Insightful Visual Performance
Model", doi:10.1145/1498765.1498785); parts run one after the other. A calibration moves the point
where memory takes over from products, multiplies each part by a factor, and adds seconds to every
call. Without one the figures are what published peaks would allow: programs lose against them, and
win where parts overlap.

Knows nothing of grids or schedules. Every figure here is a prediction.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from scipy.optimize import nnls

from ...sharding.call import KINDS, Call
from ..plan_tables import check_keys, check_number
from .compile_time import first_call_seconds
from .hardware import Hardware
from .interconnect import Interconnect
from .work import Part, Sent, Work

BINDS = ("compute", "memory", "network", "overhead")
MEMORY_FACTORS = tuple(sorted(map(float, 2 ** np.linspace(-3, 3, 13)), key=lambda x: abs(x - 1)))
"""Tried by a fit: peaks of a machine that no one has measured may be off by so much."""


@dataclass(frozen=True)
class KindFactors:
    """How calls of a kind differ from the roofline."""

    overhead: float = 0.0
    """Seconds of every call; of decode, of every step."""
    first_call: float = 0.0
    """Seconds that the first call of a graph takes beyond others."""
    memory: float = 1.0
    """Of seconds that memory takes, before they are held against those of products."""
    factors: Mapping[str, float] = field(default_factory=dict)
    """Of parts, by name; 1 of a part that has none."""


@dataclass(frozen=True)
class Calibration:
    """What measurement says about a model on a machine."""

    model: str
    """Fingerprint of the model's files."""
    dtype: str
    hardware: Mapping[str, Any]
    """The peaks that factors are of, with their name."""
    layout: str
    """As it was asked for; empty for one device."""
    kinds: Mapping[str, KindFactors]
    median_error: float
    """Of the fit, relative, over the calls that it was made from."""
    machine: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads."""
        return asdict(self)

    @classmethod
    def from_json(cls, table: Mapping[str, Any]) -> "Calibration":
        """Read a calibration; ValueError names a key that is wrong or missing."""
        check_keys("calibration", table, set(cls.__dataclass_fields__))
        check_keys("calibration kinds", table["kinds"], set(KINDS))
        for kind, found in table["kinds"].items():
            check_keys(f"calibration kinds.{kind}", found, set(KindFactors.__dataclass_fields__))
            if not isinstance(factors := found["factors"], Mapping):
                raise ValueError(f"calibration kinds.{kind}.factors: expected a table.")
            for name, value in {**found, **factors}.items():
                if name != "factors":
                    check_number(f"calibration kinds.{kind}.{name}", value)
        check_number("calibration median_error", table["median_error"])
        kinds = {kind: KindFactors(**found) for kind, found in table["kinds"].items()}
        return cls(**{**table, "kinds": kinds})


@dataclass(frozen=True)
class Estimate:
    """Predicted seconds of one call."""

    parts: Mapping[str, float]
    """By name of the part; `overhead` is no part's."""
    limits: Mapping[str, float]
    """The same seconds by what they wait for, of `BINDS`."""

    @cached_property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def binds(self) -> str:
        """What most of the time is spent on."""
        return max(self.limits, key=lambda name: self.limits[name])


class CostModel:
    """Seconds of calls of one model under a layout, on one kind of hardware."""

    def __init__(
        self,
        work: Work,
        hardware: Hardware,
        calibration: Calibration | None = None,
        torus: Sequence[int] = (),
    ):
        """`torus` are the dimensions of the interconnect; without them it is a switch."""
        self.work, self.hardware, self.calibration = work, hardware, calibration
        self.torus = torus
        self._interconnect = Interconnect(hardware, work.layout.mesh.sizes, torus)
        self._peak = hardware.peak(work.dtype)
        self._known: dict[Call, Estimate] = {}

    def first_call_seconds(self, call: Call) -> float:
        """Seconds that the first call of a graph takes beyond others.

        Without a calibration they are those of the platform.
        """
        if self.calibration is not None:
            return self.calibration.kinds[call.phase].first_call
        return first_call_seconds(self.hardware.name, self.work.num_defined)

    def seconds(self, call: Call) -> float:
        """Seconds of one call; of decode, of one step."""
        return self.estimate(call).seconds

    def estimate(self, call: Call) -> Estimate:
        """Where the seconds of a call go."""
        if call not in self._known:
            self._known[call] = self._estimate(call)
        return self._known[call]

    def roofline(self, flops: float, num_bytes: float, sent: Sent) -> float:
        """Seconds of so much work in one part, by the peaks alone."""
        part = Part("all", flops, num_bytes, sent)
        return self._local(part, KindFactors())[0] + self._network(part)

    def _estimate(self, call: Call) -> Estimate:
        known = {} if self.calibration is None else self.calibration.kinds
        return self.estimate_with(known.get(call.phase, KindFactors()), call)

    def estimate_with(self, found: KindFactors, call: Call) -> Estimate:
        """Where the seconds of a call would go with such factors."""
        parts: dict[str, float] = {}
        limits: dict[str, float] = dict.fromkeys(BINDS, 0.0)
        for part in self.work.parts(call):
            factor = found.factors.get(part.name, 1.0)
            local, limit = self._local(part, found)
            network = self._network(part)
            parts[part.name] = factor * (local + network)
            limits[limit] += factor * local
            limits["network"] += factor * network
        if found.overhead:
            parts["overhead"] = limits["overhead"] = found.overhead
        return Estimate(parts, limits)

    def _network(self, part: Part) -> float:
        """Seconds that a part sends."""
        seconds = self._interconnect.seconds
        return sum(seconds(kind, axes, sent) for (kind, axes), sent in part.sent.items())

    def _local(self, part: Part, found: KindFactors) -> tuple[float, str]:
        """Seconds of a part on its device before its own factor, and what they wait for."""
        compute = part.flops / self._peak
        memory = found.memory * part.bytes / self.hardware.memory_rate
        return (compute, "compute") if compute >= memory else (memory, "memory")


@dataclass(frozen=True)
class Measured:
    """A call and the seconds that it took; of decode, those of one step."""

    call: Call
    seconds: float
    first_call: float = 0.0
    """Seconds that the graph's first call took beyond that."""


def calibrate(
    work: Work,
    hardware: Hardware,
    measured: Sequence[Measured],
    **about: Any,
) -> Calibration:
    """The factors of least squared relative error.

    `about` is what else a `Calibration` says of itself.
    """
    model = CostModel(work, hardware)
    kinds, errors = {}, []
    for kind in KINDS:
        samples = [sample for sample in measured if sample.call.phase == kind]
        if not samples:
            raise ValueError(f"calibration: expected measured calls of {kind}, got none.")
        fits = [_fit(model, samples, memory) for memory in MEMORY_FACTORS]
        # of fits that are equally good the peaks' own is the first
        kinds[kind], found = min(fits, key=lambda fit: round(float(np.square(fit[1]).mean()), 9))
        errors += list(abs(found))
    return Calibration(
        kinds=kinds,
        median_error=float(np.median(errors)),
        dtype=work.dtype,
        hardware={"name": hardware.name, **hardware.to_table()},
        **about,
    )


def _fit(
    model: CostModel, samples: Sequence[Measured], memory: float
) -> tuple[KindFactors, np.ndarray]:
    """Factors, none below 0 (Lawson and Hanson 1974, ch. 23), and their relative errors."""
    raw = KindFactors(memory=memory)
    rows = [model.estimate_with(raw, sample.call).parts for sample in samples]
    names = list(rows[0])
    seconds = np.array([sample.seconds for sample in samples])
    features = np.array([[1.0, *(row[name] for name in names)] for row in rows])
    relative = features / seconds[:, None]
    solution, _ = nnls(relative, np.ones(len(samples)))
    overhead, *factors = map(float, solution)
    first_call = max(0.0, statistics.median(sample.first_call for sample in samples))
    found = KindFactors(overhead, first_call, memory, dict(zip(names, factors, strict=True)))
    return found, relative @ solution - 1
