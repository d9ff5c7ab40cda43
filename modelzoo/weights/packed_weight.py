"""Weights in panels, in which kernels for the CPU read them one number after another.

The array keeps the shape of the weight; only the order of its numbers differs. A weight is G
matrices `[K, N]`: K are its input features, N the axes after these, G the axes before them; if
there are none after them, N are those before. Each matrix has panels of C columns, the last one of
what is left, and a panel is `[K / P, C, P]`: P numbers of a column fill 32 bits.

Knows nothing of kernels.
"""

import math
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..cpu.moves import take_units

_OfAxes = TypeVar("_OfAxes", tuple[int, ...], str)
_MOST_NUMBERS = 2**31 - 1
"""The numbers of the largest weight whose rows `take` finds."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedWeight:
    """A weight in panels."""

    numbers: jax.Array
    """The numbers in the order of panels, in the shape of the weight."""
    inputs: tuple[int, ...] = field(metadata={"static": True})
    """The axes of the input features, counted from the end."""
    columns: int = field(metadata={"static": True})
    """The columns of a panel."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.numbers.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the weight."""
        return self.numbers.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the weight."""
        return self.numbers.dtype

    @property
    def is_transposed(self) -> bool:
        """Whether the input features are the last axes, and N those before them."""
        return self.inputs[-1] == -1

    @property
    def matrices(self) -> tuple[int, int, int]:
        """G, K and N."""
        num_groups, num_columns = map(math.prod, self.split(self.shape))
        return num_groups, self.numbers.size // (num_groups * num_columns), num_columns

    def split(self, of_axes: _OfAxes) -> tuple[_OfAxes, _OfAxes]:
        """The values of the axes of G and those of N, from values of all axes of the weight."""
        return _split(of_axes, self.inputs)

    def __getitem__(self, index: Any) -> "PackedWeight":
        """The weight itself at `...`; it has no parts."""
        assert index is ..., "a part of a weight is not a range of its panels"
        return self

    def plain(self) -> jax.Array:
        """The weight in the order of its axes."""
        num_groups, num_inputs, num_columns = self.matrices
        panels_GI = self.numbers.reshape(num_groups, -1)
        parts, start = [], 0
        for columns, width in _panels(num_columns, self.columns):
            end = start + num_inputs * columns
            packed = panels_GI[:, start:end].reshape(
                num_groups, columns // width, -1, width, _together(self.dtype)
            )
            parts.append(packed.transpose(0, 2, 4, 1, 3).reshape(num_groups, num_inputs, columns))
            start = end
        matrix_GKN = jnp.concatenate(parts, axis=2)
        return (matrix_GKN.swapaxes(1, 2) if self.is_transposed else matrix_GKN).reshape(self.shape)

    def take(self, ids: jax.Array) -> jax.Array:
        """Rows of a table `[V, D]`, whose inputs are D; an id past the last row is clipped."""
        num_rows, num_features = self.shape
        row_M1 = jnp.clip(ids.reshape(-1), 0, num_rows - 1)[:, None]
        first_M1, together = row_M1 // self.columns * self.columns, _together(self.dtype)
        width_M1 = jnp.minimum(self.columns, num_rows - first_M1)
        # P numbers of a column lie together
        unit_1W = jnp.arange(num_features // together)[None]
        place_MW = first_M1 * unit_1W.size + unit_1W * width_M1 + row_M1 - first_M1
        rows = take_units(self.numbers, place_MW, together)
        return rows.reshape(*ids.shape, num_features)


def pack(weight: jax.Array, inputs: tuple[int, ...], columns: int) -> jax.Array:
    """The numbers of a weight in the order of panels, in its shape; see `PackedWeight`.

    Args:
      weight: The weight; the number of its input features is a multiple of P.
      inputs: The axes of its input features, counted from the end.
      columns: C.
    """
    packed = PackedWeight(weight, inputs, columns)
    num_groups, num_inputs, num_columns = packed.matrices
    if packed.is_transposed:
        matrix_GKN = weight.reshape(1, num_columns, num_inputs).swapaxes(1, 2)
    else:
        matrix_GKN = weight.reshape(num_groups, num_inputs, num_columns)
    parts, start = [], 0
    for columns_, width in _panels(num_columns, columns):
        part = matrix_GKN[:, :, start : start + columns_]
        part = part.reshape(num_groups, -1, _together(weight.dtype), columns_ // width, width)
        parts.append(part.transpose(0, 3, 1, 4, 2).reshape(num_groups, -1))
        start += columns_
    return jnp.concatenate(parts, axis=1).reshape(weight.shape)


def can_pack(
    shape: tuple[int, ...],
    inputs: tuple[int, ...],
    dtype: DTypeLike = "bfloat16",
    multiple: int = 1,
) -> bool:
    """Whether kernels read a weight in panels, in float32 or bfloat16, or in another dtype.

    Its columns must be a multiple of a number.
    """
    num_inputs = math.prod(shape[axis] for axis in inputs)
    num_columns = math.prod(_split(shape, inputs)[1])
    has_units = num_inputs % _together(dtype) == 0 and num_columns % multiple == 0
    return has_units and math.prod(shape) <= _MOST_NUMBERS


def _split(of_axes: _OfAxes, inputs: tuple[int, ...]) -> tuple[_OfAxes, _OfAxes]:
    """The values of the axes of G and those of N."""
    before, after = of_axes[: inputs[0]], of_axes[len(of_axes) + inputs[-1] + 1 :]
    return (before, after) if inputs[-1] != -1 else (of_axes[:0], before)


def _together(dtype: DTypeLike) -> int:
    """P of a dtype."""
    return 4 // jnp.dtype(dtype).itemsize


def _panels(num_columns: int, columns: int) -> list[tuple[int, int]]:
    """The columns in whole panels and those in the last one, each with the width of a panel."""
    whole = num_columns // columns * columns
    parts = [(whole, columns), (num_columns - whole, num_columns - whole)]
    return [part for part in parts if part[0]]
