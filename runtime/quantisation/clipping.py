"""Scales of groups that clip their largest values, if the squared error of the group is less then.

Knows nothing of models, files or devices.
"""

from typing import TYPE_CHECKING

import numpy as np

from ...modelzoo.weight_formats import Quantisation
from ..checkpoint.quantiser import codes_of, dequantise, magnitudes, scales_of, split_groups

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

SHARES = tuple(np.linspace(1.0, 0.5, 21).tolist())
"""The shares of the largest magnitude of a group that may become the largest code."""


def clipped_scales(
    weight: np.ndarray,
    quantisation: Quantisation,
    dtype: "DTypeLike",
    importance_A: np.ndarray | None = None,
) -> np.ndarray:
    """The scale of each group with the least squared error among `SHARES`.

    Args:
      weight: The weight in float32.
      quantisation: Its quantisation.
      dtype: The dtype of scales.
      importance_A: The factor of the squared error of each input feature; by default 1 for all.
    """
    largest = magnitudes(weight, quantisation)
    best, least = np.ones(largest.shape, dtype), np.full(largest.shape, np.inf, np.float32)
    for share in SHARES:
        scales = scales_of(largest * np.float32(share), quantisation, dtype)
        errors = _squared_errors(weight, scales, quantisation, importance_A)
        is_less = errors < least
        best[is_less], least[is_less] = scales[is_less], errors[is_less]
    return best


def _squared_errors(
    weight: np.ndarray,
    scales: np.ndarray,
    quantisation: Quantisation,
    importance_A: np.ndarray | None,
) -> np.ndarray:
    """The squared error of each group with these scales, in the shape of the scales."""
    codes = codes_of(weight, scales, quantisation, np.int8)
    errors = dequantise(codes, scales, quantisation)
    errors -= weight
    np.square(errors, out=errors)
    by_group = split_groups(errors, quantisation, scales.shape)
    if importance_A is not None:
        _, groups, members, _ = by_group.shape
        by_group *= importance_A.astype(np.float32).reshape(1, groups, members, 1)
    return by_group.sum(axis=2).reshape(scales.shape)
