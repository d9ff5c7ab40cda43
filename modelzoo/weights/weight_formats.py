"""Formats of weights in codes: the dtype of codes, groups, and the shape of their scales.

A weight in codes has the value `codes * scales`, or `codes * scales + offsets`. Its *inputs* are
the axes of its input features; they are adjacent and count as one axis. A *group* is a range of
input features with one scale for each output feature. Without groups, all input features of an
output feature share a scale. The scales have the axes of the weight, with an axis of groups in
place of the inputs; offsets have the axes of the scales:

    weight                  inputs    codes           scales, groups of 64   without groups
    [D, F] = [512, 1024]    D         [512, 1024]     [8, 1024]              [1, 1024]
    [K, G, H, D], H = 64    K, G, H   [K, G, H, D]    [K * G, D]             [1, D]

Knows nothing of arrays.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

_Value = TypeVar("_Value")

CODE_BITS = {"int8": 8, "float8_e4m3fn": 8, "int4": 4}
"""The bits of a code, by dtype of the codes that weights can be rounded to."""
LARGEST_CODES = {"int8": 127, "float8_e4m3fn": 448, "int4": 7}
"""The largest code, by the same dtypes; the smallest one is its negative."""
BYTE_DTYPES = {
    "int8": "int8",
    "int4": "int8",
    "uint4": "uint8",
    "float8_e4m3fn": "float8_e4m3fn",
    "float4_e2m1fn": "float8_e4m3fn",
}
"""A dtype of one byte that has all values of the codes, by dtype of the codes."""
SCALE_DTYPES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
"""The dtypes that published scales may have."""
SCALES, OFFSETS, ORDER = ".scales", ".offsets", ".order"
"""The ends of the paths of scales, offsets and orders, after the path of the weight."""


@dataclass(frozen=True)
class WeightFormat:
    """The dtype of codes, the size of groups, and the kind of their scales and offsets."""

    codes: str
    """A key of `BYTE_DTYPES`."""
    group: int = 0
    """The number of input features that share a scale; 0 for all input features."""
    scales: str = ""
    """The dtype of published scales. If it is empty, weights are rounded to codes, and scales have
    the dtype of weights that are not quantised."""
    has_offsets: bool = False
    """Whether groups have offsets, in float32."""
    is_ordered: bool = False
    """Whether codes have another order of input features, in which groups are ranges."""

    @property
    def is_published(self) -> bool:
        """Whether codes and scales are those of the checkpoint."""
        return bool(self.scales)

    def __str__(self) -> str:
        groups = f" in groups of {self.group}" if self.group else ""
        offsets = " with offsets" if self.has_offsets else ""
        order = " in order of activations" if self.is_ordered else ""
        return f"{self.codes}{groups}{order}{offsets}" + (
            f", scales in {self.scales}" * bool(self.scales)
        )


def common_format(formats: Iterable[WeightFormat | None]) -> WeightFormat | None:
    """A format that holds arrays of several published formats exactly; None if only float does.

    >>> str(common_format(WeightFormat("int4", g, "float16") for g in (32, 48)))
    'int4 in groups of 16, scales in float16'
    """
    return reduce(_join, formats)


def _join(one: WeightFormat | None, other: WeightFormat | None) -> WeightFormat | None:
    if one is None or other is None or one == other:
        return one if one == other else None
    codes = one.codes
    if one.codes != other.codes:
        bytes_ = {BYTE_DTYPES[x.codes].removeprefix("u") for x in (one, other)}
        if len(bytes_) > 1:
            return None
        # codes of four bits without a sign fit into int8, too
        codes = bytes_.pop()
    group = math.gcd(one.group, other.group)
    if group == 1 or one.is_ordered != other.is_ordered:
        return None
    return WeightFormat(
        codes,
        group,
        one.scales if one.scales == other.scales else "float32",
        one.has_offsets or other.has_offsets,
        one.is_ordered,
    )


@dataclass(frozen=True)
class Quantisation:
    """The quantisation of one weight: its format and its inputs."""

    format: WeightFormat
    inputs: tuple[int, ...]
    """The axes of the input features, counted from the end."""
    rounds_activations: bool = False
    """Whether products round their activations to int8, too; only for int8 without groups."""

    def num_inputs(self, shape: tuple[int, ...]) -> int:
        """The number of input features of a weight, or of a part of one."""
        return math.prod(shape[axis] for axis in self.inputs)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of a weight, or of a part of one with whole groups."""
        group = self.format.group
        return self.replace_inputs(shape, self.num_inputs(shape) // group if group else 1)

    def of_scales(self, of_axes: tuple[_Value, ...], shared: _Value) -> tuple[_Value, ...]:
        """One value for each axis of the scales, from one value for each axis of the weight.

        Args:
          of_axes: The values of the axes of the weight, such as logical axes.
          shared: The value of the axis of groups if all input features share a scale. Otherwise
            the axis of groups has the value of the first input axis, as only this axis may be
            split.
        """
        of_groups = of_axes[self.inputs[0]] if self.format.group else shared
        return self.replace_inputs(of_axes, of_groups)

    def replace_inputs(self, of_axes: tuple[_Value, ...], *new: _Value) -> tuple[_Value, ...]:
        """The values of all axes of a weight, with `new` in place of those of the inputs."""
        return replace_axes(of_axes, self.inputs, *new)


def replace_axes(
    of_axes: tuple[_Value, ...], inputs: tuple[int, ...], *new: _Value
) -> tuple[_Value, ...]:
    """The values of all axes of a weight, with `new` in place of those of some adjacent axes.

    `inputs` are these axes, counted from the end.
    """
    start, stop = (len(of_axes) + axis for axis in (inputs[0], inputs[-1] + 1))
    return (*of_axes[:start], *new, *of_axes[stop:])
