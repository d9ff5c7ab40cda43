"""Round a weight to codes and scales by one of three methods.

`nearest` is the rounding of weights that load in codes (`checkpoint.quantiser`). `clip` chooses
the scale of each group by the least squared error. `gptq` chooses scales as `clip` does, with
the squared error weighted by the Hessian, and then codes by GPTQ.

Knows nothing of models, files or devices.
"""

from typing import TYPE_CHECKING

import numpy as np

from ...modelzoo.weight_formats import BYTE_DTYPES, Quantisation
from ..checkpoint.quantiser import codes_of, largest_code, magnitudes, scales_of
from .clipping import clipped_scales
from .gptq import gptq_codes

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

NEAREST, CLIP, GPTQ = METHODS = ("nearest", "clip", "gptq")


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
