"""Means over tokens with standard errors over rows, and the figures of two compared models.

Tokens of a row depend on each other, so a standard error that took them as independent would be too
small. The errors here are those of a mean over clusters (Cochran 1977, "Sampling Techniques",
section 9A): rows are the clusters, and a row counts as many tokens as it has.

Knows nothing of models or files.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

QUANTILES = (0.5, 0.9, 0.99, 1.0)
LARGE = 1e6
"""The number from which on numbers are printed with an exponent."""


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error; the error of a single row is unknown, and is None."""

    mean: float
    error: float | None

    def as_json(self) -> dict[str, float | None]:
        """The estimate as an object; JSON has no infinite numbers, which are null."""
        return {"mean": _finite(self.mean), "standard_error": _finite(self.error)}

    def text(self, digits: int, factor: float = 1.0) -> str:
        """The mean and its error, both times a factor, with this number of decimals."""
        error = "?" if self.error is None else decimal(self.error * factor, digits)
        return f"{decimal(self.mean * factor, digits)} ± {error}"


def decimal(number: float, digits: int) -> str:
    """A number with this number of decimals; a large one with an exponent."""
    return f"{number:.{digits}{'f' if number < LARGE else 'e'}}"


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None


def mean_over_rows(rows: Sequence[np.ndarray]) -> Estimate:
    """The mean over the tokens of all rows.

    Args:
      rows: For each row, one value for each token.
    """
    count, num_tokens = len(rows), sum(map(len, rows))
    mean = sum(float(row.sum()) for row in rows) / num_tokens
    if count < 2:
        return Estimate(mean, None)
    squares = sum(float((row - mean).sum()) ** 2 for row in rows)
    return Estimate(mean, math.sqrt(squares * count / (count - 1)) / num_tokens)


def perplexity(logprobs: Sequence[np.ndarray]) -> Estimate:
    """The exponential of the mean negative log-probability, with its error to first order.

    It is infinite, with an unknown error, if no float can hold it.
    """
    loss = mean_over_rows([-row for row in logprobs])
    try:
        value = math.exp(loss.mean)
    except OverflowError:
        return Estimate(math.inf, None)
    return Estimate(value, None if loss.error is None else value * loss.error)


@dataclass(frozen=True)
class PairFigures:
    """The figures of a compared model against the reference, over the same tokens."""

    divergence: Estimate
    """The mean Kullback-Leibler divergence of next-token distributions from the reference's, in
    nats."""
    agreement: Estimate
    """The share of tokens where both models have the same likeliest token."""
    perplexity: Estimate
    """The perplexity of the compared model."""
    reference_perplexity: Estimate
    divergence_quantiles: Mapping[float, float]
    """The divergence below which a share of all tokens is, for each of `QUANTILES`."""
    widest_gap: float
    """The largest difference, over all tokens, between two log-probabilities of the reference.

    One is that of its own choice, the other that of the compared model's choice.
    """

    @classmethod
    def of(cls, rows: Sequence[np.ndarray]) -> "PairFigures":
        """Compute all figures.

        Args:
          rows: For each row, an array `[tokens, 5]` with the fields of `TokenFigures`.
        """
        divergence, agreement, reference, compared, gap = (
            [row[:, i].astype(np.float64) for row in rows] for i in range(5)
        )
        tokens = np.concatenate(divergence)
        return cls(
            mean_over_rows(divergence),
            mean_over_rows(agreement),
            perplexity(compared),
            perplexity(reference),
            {share: float(np.quantile(tokens, share)) for share in QUANTILES},
            max(float(row.max()) for row in gap),
        )

    def as_json(self) -> dict[str, Any]:
        """The figures as an object."""
        names = ("divergence", "agreement", "perplexity", "reference_perplexity")
        estimates = {name: getattr(self, name).as_json() for name in names}
        quantiles = {str(share): value for share, value in self.divergence_quantiles.items()}
        return {**estimates, "divergence_quantiles": quantiles, "widest_gap": self.widest_gap}
