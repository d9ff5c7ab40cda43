"""Options of rotary position embedding, as frozen dataclasses.

The options are data; `rope` computes with them. Knows nothing of layers or heads.
"""

import math
from dataclasses import dataclass

from .errors import UserError


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: positions divided by `factor` (Chen et al. 2023, 2306.15595)."""

    factor: float


@dataclass(frozen=True)
class Llama3Scaling:
    """Scaling of Llama 3.1: long wavelengths are stretched by `factor`, short ones are kept.

    A ramp lies between the two.
    """

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_max_position: int


@dataclass(frozen=True)
class YarnScaling:
    """NTK-by-parts interpolation with a temperature (YaRN, Peng et al. 2023, arXiv 2309.00071)."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Factor on cosines and sines; None means `0.1 * ln(factor) + 1`, as in the paper."""
    truncate: bool = True
    """Whether the ends of the ramp are rounded to whole dimensions, as in the code of the paper."""


@dataclass(frozen=True)
class FactorScaling:
    """A divisor for the frequency of each pair (LongRoPE, Ding et al. 2024, 2402.13753).

    GGUF publishes the scaling of Llama 3.1 in this form, too.
    """

    factors: tuple[float, ...]
    attention_factor: float = 1.0
    """Factor on cosines and sines."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864)."""

    theta: float = 10_000.0
    scaling: LinearScaling | Llama3Scaling | YarnScaling | FactorScaling | None = None
    rotated: int | None = None
    """The number of head features that are rotated, from the first on; None means all."""
    norm_epsilon: float | None = None
    """Epsilon of a root mean square norm, without scale, of each rotated head; None means no
    norm."""
    growth: float = 0.0
    """Queries at position p are multiplied by `1 + growth * ln(1 + floor(p / growth_interval))`
    (Ministral 3, after Nakanishi 2025, 2501.19399)."""
    growth_interval: int = 1


@dataclass(frozen=True)
class NoRope:
    """No rotation: positions enter only through the causal mask (2305.19466).

    Queries at position p may be multiplied by `1 + scale * ln(1 + floor((p + 1) / interval))`, so
    that attention over many keys stays sharp (Nakanishi 2025, 2501.19399; Llama 4).
    """

    scale: float = 0.0
    interval: int = 1

    def __post_init__(self):
        if not (math.isfinite(self.scale) and self.scale >= 0) or self.interval < 1:
            raise UserError(
                f"rope: expected a scale of at least 0 and an interval of at least 1, got {self}."
            )
