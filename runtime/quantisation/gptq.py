"""Codes that keep the products of a weight with calibration rows, and not only its values.

Source: Frantar et al. 2023, "GPTQ" (2210.17323), algorithm 1, and its section "Additional Tricks".
The loss of a weight is `|X^T W - X^T W'|^2`, so its Hessian in the input features is `H = X X^T`,
up to a factor that changes no code. Input features are rounded one after the other. The error of
each is moved to the features that are not rounded yet, by the rows of the Cholesky factor of the
inverse of H.

Knows nothing of models, files or devices.
"""

import numpy as np
from scipy.linalg import cholesky, get_lapack_funcs

DAMPING = 0.01
"""The share of the mean of the diagonal of a Hessian that is added to its diagonal."""
MIN_TOKENS = 1 / 8
"""The minimum number of calibration tokens of a weight, as a share of its input features. Codes
that fit fewer tokens may lose more on other tokens than `clip` does."""
_BLOCK = 128
"""The number of features whose errors are moved within a block before they are moved beyond it."""


def gptq_codes(
    weight_AF: np.ndarray, hessian_AA: np.ndarray, scales_AF: np.ndarray, largest: int
) -> np.ndarray:
    """The codes of a weight.

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
