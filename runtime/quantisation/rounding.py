"""Round a weight to codes and scales by one of three methods.

`nearest` is the rounding of weights that load in codes (`checkpoint.quantiser`). `clip` chooses
the scale of each group by the least squared error. `gptq` chooses scales as `clip` does, with
the squared error weighted by the Hessian, and then codes by GPTQ.

Knows nothing of models, files or devices.
"""

from typing import TYPE_CHECKING

import numpy as np

from ...modelzoo.weights.weight_formats import BYTE_DTYPES, Quantisation
from ..checkpoint.quantiser import (
    codes_of,
    dequantise,
    largest_code,
    magnitudes,
    scales_of,
    split_groups,
)
from .gptq import gptq_codes

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

NEAREST, CLIP, GPTQ = METHODS = ("nearest", "clip", "gptq")
SHARES = tuple(np.linspace(1.0, 0.5, 21).tolist())
"""The shares of the largest magnitude of a group that may become the largest code."""


def round_weight(
    weight: np.ndarray,
    quantisation: Quantisation,
    dtype: "DTypeLike",
    method: str,
    hessian_AA: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Round a weight.

    Args:
      weight: The whole weight in float32.
      quantisation: Its quantisation.
      dtype: The dtype of scales.
      method: One of `METHODS`; `nearest` for codes in float8.
      hessian_AA: The Hessian of the weight, for `gptq`; without one, `gptq` is `clip`.

    Returns:
      Codes in a dtype of one byte, and scales.
    """
    if method == NEAREST:
        scales = scales_of(magnitudes(weight, quantisation), quantisation, dtype)
        in_bytes = np.dtype(BYTE_DTYPES[quantisation.format.codes])
        return codes_of(weight, scales, quantisation, in_bytes), scales
    if hessian_AA is None:
        scales = clipped_scales(weight, quantisation, dtype)
        return codes_of(weight, scales, quantisation, np.int8), scales
    scales = clipped_scales(weight, quantisation, dtype, hessian_AA.diagonal())
    as_matrix = _Matrix(weight.shape, quantisation)
    group = quantisation.format.group or quantisation.num_inputs(weight.shape)
    scales_AF = np.repeat(as_matrix.join(scales), group, axis=0).astype(np.float32)
    weight_AF = as_matrix.join(weight)
    codes_AF = gptq_codes(weight_AF, hessian_AA, scales_AF, largest_code(quantisation))
    return as_matrix.split(codes_AF), scales


class _Matrix:
    """The view of a weight as a matrix of input features and output features."""

    def __init__(self, shape: tuple[int, ...], quantisation: Quantisation):
        self._shape = shape
        start, stop = (len(shape) + quantisation.inputs[i] for i in (0, -1))
        self._outer, self._inner = shape[:start], shape[stop + 1 :]

    def join(self, array: np.ndarray) -> np.ndarray:
        """A weight, or its scales, as a matrix `[A, F]`, or `[groups, F]`."""
        outer, inner = int(np.prod(self._outer)), int(np.prod(self._inner))
        return array.reshape(outer, -1, inner).swapaxes(0, 1).reshape(-1, outer * inner)

    def split(self, matrix_AF: np.ndarray) -> np.ndarray:
        """A matrix in the shape of the weight."""
        outer, inner = int(np.prod(self._outer)), int(np.prod(self._inner))
        by_outer = matrix_AF.reshape(len(matrix_AF), outer, inner).swapaxes(0, 1)
        return np.ascontiguousarray(by_outer).reshape(self._shape)


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
