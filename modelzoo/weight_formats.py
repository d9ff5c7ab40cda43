"""Formats of weights in codes: the dtype of codes, groups, and the shape of their scales.

A weight in codes has the value `codes * scales`. Its *inputs* are the axes of its input features;
they are adjacent and count as one axis. A *group* is a range of input features with one scale for
each output feature. Without groups, all input features of an output feature share a scale. The
scales have the axes of the weight, with an axis of groups in place of the inputs:

    weight                  inputs    codes           scales, groups of 64   without groups
    [D, F] = [512, 1024]    D         [512, 1024]     [8, 1024]              [1, 1024]
    [K, G, H, D], H = 64    K, G, H   [K, G, H, D]    [K * G, D]             [1, D]

Knows nothing of arrays.
"""

import math
from dataclasses import dataclass
from typing import TypeVar

_Value = TypeVar("_Value")

CODE_BITS = {"int8": 8, "int4": 4}
"""The bits of a code, by dtype of the codes."""
SCALES = ".scales"
"""The end of the path of the scales, after the path of the weight."""


@dataclass(frozen=True)
class WeightFormat:
    """The dtype of codes and the size of groups."""

    codes: str
    """A key of `CODE_BITS`."""
    group: int = 0
    """The number of input features that share a scale; 0 for all input features."""

    def __str__(self) -> str:
        return f"{self.codes} in groups of {self.group}" if self.group else self.codes


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
          shared: The value of the axis of groups if all input features share a scale. Otherwise it
            is that of the first input axis, as only this axis may be split.
        """
        of_groups = of_axes[self.inputs[0]] if self.format.group else shared
        return self.replace_inputs(of_axes, of_groups)

    def replace_inputs(self, of_axes: tuple[_Value, ...], *new: _Value) -> tuple[_Value, ...]:
        """The values of all axes of a weight, with `new` in place of those of the inputs."""
        start, stop = (len(of_axes) + axis for axis in (self.inputs[0], self.inputs[-1] + 1))
        return (*of_axes[:start], *new, *of_axes[stop:])
