"""Round a weight to codes and scales by one of three methods.

`nearest` is the rounding of weights that load in codes (`checkpoint.quantiser`). `clip` chooses
the scale of each group by the least squared error. `gptq` chooses scales as `clip` does, with
the squared error weighted by the Hessian, and then codes by GPTQ.

Knows nothing of models, files or devices.
"""

from typing import TYPE_CHECKING

import numpy as np
from scipy.linalg import cholesky, get_lapack_funcs

from ...modelzoo.weights.weight_formats import BYTE_DTYPES, Quantisation
from ..checkpoint.quantiser import (
    codes_of,
    dequantise,
    largest_code,
    magnitudes,
    scales_of,
    split_groups,
)

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

DAMPING = 0.01
"""The share of the mean of the diagonal of a Hessian that is added to its diagonal."""
MIN_TOKENS = 1 / 8
"""The minimum number of calibration tokens of a weight, as a share of its input features. Codes
that fit fewer tokens may lose more on other tokens than `clip` does."""
_BLOCK = 128
"""The number of features whose errors are moved within a block before they are moved beyond it."""

NEAREST, CLIP, GPTQ = ("nearest", "clip", "gptq")
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
      method: `nearest`, `clip` or `gptq`; `nearest` for codes in float8.
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


def gptq_codes(
    weight_AF: np.ndarray, hessian_AA: np.ndarray, scales_AF: np.ndarray, largest: int
) -> np.ndarray:
    """The codes of a weight that keep its products with calibration rows, and not only its values.

    Source: Frantar et al. 2023, "GPTQ" (2210.17323), algorithm 1, and its section "Additional
    Tricks". The loss of a weight is `|X^T W - X^T W'|^2`, so its Hessian in the input features is
    `H = X X^T`, up to a factor that changes no code. Input features are rounded one after the
    other. The error of each is moved to the features that are not rounded yet, by the rows of the
    Cholesky factor of the inverse of H.

    Input features are rounded in descending order of the diagonal of the Hessian, so the errors of
    the most important ones are moved to all others. Scales are those of groups of neighbours in
    the given order of features, so a reader needs no other order.

    Args:
      weight_AF: The weight, with input features A and output features F.
      hessian_AA: The sum of the outer products of the calibration rows.
      scales_AF: The scale of each value.
      largest: The largest code; the smallest one is its negative.

    Returns:
      Codes `[A, F]` in int8.
    """
    order_A = np.argsort(-hessian_AA.diagonal(), kind="stable")
    factor_AA = _inverse_factor(hessian_AA, order_A)
    weight_AF, scales_AF = weight_AF[order_A].astype(np.float32), scales_AF[order_A]
    codes_AF = np.empty(weight_AF.shape, np.int8)
    for start in range(0, len(weight_AF), _BLOCK):
        block = slice(start, start + _BLOCK)
        errors = _round_block(
            weight_AF[block], factor_AA[block, block], scales_AF[block], largest, codes_AF[block]
        )
        rest = slice(start + _BLOCK, None)
        weight_AF[rest] -= factor_AA[block, rest].T @ errors
    in_given_order = np.empty_like(codes_AF)
    in_given_order[order_A] = codes_AF
    return in_given_order


def _round_block(
    weight_CF: np.ndarray,
    factor_CC: np.ndarray,
    scales_CF: np.ndarray,
    largest: int,
    codes_CF: np.ndarray,
) -> np.ndarray:
    """Round the features C of a block in order; return their errors over the factor's diagonal."""
    errors_CF = np.empty_like(weight_CF)
    for c, (scale_F, factor_C) in enumerate(zip(scales_CF, factor_CC, strict=True)):
        code_F = np.clip(np.rint(weight_CF[c] / scale_F), -largest, largest)
        codes_CF[c] = code_F
        errors_CF[c] = (weight_CF[c] - code_F * scale_F) / factor_C[c]
        weight_CF[c + 1 :] -= np.outer(factor_C[c + 1 :], errors_CF[c])
    return errors_CF


def _inverse_factor(hessian_AA: np.ndarray, order_A: np.ndarray) -> np.ndarray:
    """The upper Cholesky factor `U` of the inverse of a Hessian, `U^T U`, in float32.

    Args:
      hessian_AA: The Hessian.
      order_A: The order of its features in the factor.
    """
    # the factor of the inverse is the inverse of that of the matrix in reverse order
    reverse_A = order_A[::-1]
    # transposed, as LAPACK works in place on arrays in Fortran's order
    matrix_AA = hessian_AA[np.ix_(reverse_A, reverse_A)].astype(np.float64).T
    # a Hessian without calibration rows is zero: then features are rounded to nearest
    matrix_AA[np.diag_indices(len(matrix_AA))] += DAMPING * matrix_AA.diagonal().mean() or 1.0
    matrix_AA = cholesky(matrix_AA, lower=True, overwrite_a=True, check_finite=False)
    (invert,) = get_lapack_funcs(("trtri",), (matrix_AA,))
    lower_AA, _ = invert(matrix_AA, lower=1, overwrite_c=1)
    return np.ascontiguousarray(lower_AA[::-1, ::-1], dtype=np.float32)
