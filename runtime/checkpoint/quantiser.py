"""Round the parts of weights to codes while they load.

Symmetric rounding to nearest, without calibration: the scale of a group is its largest magnitude
over the largest code, rounded to the dtype of scales. A code is the value over the rounded scale,
rounded to the nearest code.

Knows nothing of files or devices.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from ...modelzoo.weights.weight_formats import LARGEST_CODES, Quantisation
from .tensor_source import Box, Interval

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

_PIECE = 2**20
"""The number of values that are rounded at once."""


class WeightQuantiser:
    """Rounds one weight to codes, box by box, and holds its scales."""

    def __init__(self, quantisation: Quantisation, shape: tuple[int, ...], dtype: "DTypeLike"):
        """Create a quantiser of a weight of this shape, with scales of this dtype."""
        self._quantisation, self._shape = quantisation, shape
        self._is_measured = False
        self.scales = np.ones(quantisation.scale_shape(shape), dtype)
        """The scales, filled by `measure`, or for the boxes that `codes` has rounded."""

    def shares_groups(self, box: Box) -> bool:
        """Whether a box has only a part of the input features of a group."""
        sizes = tuple(map(len, box))
        is_part = self._quantisation.num_inputs(sizes) < self._quantisation.num_inputs(self._shape)
        return is_part and not self._quantisation.format.group

    def measure(self, boxes: Iterable[tuple[Box, np.ndarray]]) -> None:
        """Compute the scales from boxes that together have the whole weight."""
        largest = np.zeros(self.scales.shape, np.float32)
        for box, weight in boxes:
            index = self._scale_index(box)
            largest[index] = np.maximum(largest[index], magnitudes(weight, self._quantisation))
        self.scales = scales_of(largest, self._quantisation, self.scales.dtype)
        self._is_measured = True

    def codes(self, box: Box, weight: np.ndarray, dtype: "DTypeLike") -> np.ndarray:
        """The codes of a box in a dtype; without `measure`, it must have whole groups."""
        index, quantisation = self._scale_index(box), self._quantisation
        if not self._is_measured:
            largest = magnitudes(weight, quantisation)
            self.scales[index] = scales_of(largest, quantisation, self.scales.dtype)
        return codes_of(weight, self.scales[index], quantisation, dtype)

    def _scale_index(self, box: Box) -> tuple[slice, ...]:
        """The index of the scales of a box."""
        quantisation, groups = self._quantisation, Interval(0, 1)
        if group := quantisation.format.group:
            first = quantisation.inputs[0]
            # the number of features at an index of the first input axis; other input axes are whole
            features = quantisation.num_inputs(self._shape) // self._shape[first]
            start, stop = (end * features for end in (box[first].start, box[first].stop))
            assert not start % group and not stop % group, "a group is on one device"
            groups = Interval(start // group, stop // group)
        of_scales = quantisation.replace_inputs(box, groups)
        return tuple(interval.as_slice() for interval in of_scales)


def weight_box(quantisation: Quantisation, shape: tuple[int, ...], box: Box) -> Box:
    """The box of a weight that has all features of the groups in a box of scales."""
    axes = [len(shape) + axis for axis in quantisation.inputs]
    inputs = [Interval(0, shape[axis]) for axis in axes]
    if group := quantisation.format.group:
        features = math.prod(shape[axis] for axis in axes[1:])
        groups = box[axes[0]]
        start, stop = groups.start * group, groups.stop * group
        # groups are split over devices along the first input axis
        inputs[0] = Interval(start // features, -(-stop // features))
        assert len(inputs[0]) * features == stop - start, "a group is on one device"
    return (*box[: axes[0]], *inputs, *box[axes[0] + 1 :])


def largest_code(quantisation: Quantisation) -> int:
    """The largest code; the smallest one is its negative."""
    return LARGEST_CODES[quantisation.format.codes]


def magnitudes(weight: np.ndarray, quantisation: Quantisation) -> np.ndarray:
    """The largest magnitude of each group of a part of a weight, in the shape of its scales."""
    shape = quantisation.scale_shape(weight.shape)
    grouped = split_groups(weight, quantisation, shape)
    return np.maximum(grouped.max(axis=2), -grouped.min(axis=2)).reshape(shape)


def scales_of(magnitudes: np.ndarray, quantisation: Quantisation, dtype: "DTypeLike") -> np.ndarray:
    """The scales of groups with these magnitudes; 1 for a group of zeros."""
    scales = (magnitudes / largest_code(quantisation)).astype(dtype)
    scales[scales == 0] = 1
    return scales


def codes_of(
    weight: np.ndarray, scales: np.ndarray, quantisation: Quantisation, dtype: "DTypeLike"
) -> np.ndarray:
    """The codes of a part of a weight in a dtype that has all of them, given its scales."""
    largest = largest_code(quantisation)
    are_integers = quantisation.format.codes.startswith("int")
    grouped = split_groups(weight, quantisation, scales.shape)
    members, features = grouped.shape[2:]
    grouped = grouped.reshape(-1, members, features)
    of_groups = scales.reshape(-1, 1, features).astype(np.float32)
    codes = np.empty(grouped.shape, dtype)
    # pieces, as all of the weight would need another array of its size
    groups_step = max(1, _PIECE // (members * features))
    members_step = max(1, _PIECE // features)
    for first in range(0, len(grouped), groups_step):
        groups = slice(first, first + groups_step)
        for start in range(0, members, members_step):
            part = groups, slice(start, start + members_step)
            rounded = grouped[part] / of_groups[groups]
            if are_integers:
                np.rint(rounded, out=rounded)
            # small floats are rounded to nearest by the assignment
            codes[part] = np.clip(rounded, -largest, largest, out=rounded)
    return codes.reshape(weight.shape)


def dequantise(codes: np.ndarray, scales: np.ndarray, quantisation: Quantisation) -> np.ndarray:
    """The values of a weight in float32, as `QuantisedWeight` computes them on devices."""
    groups = split_groups(codes, quantisation, scales.shape)
    outer, count, _, features = groups.shape
    by_group = scales.astype(np.float32).reshape(outer, count, 1, features)
    return (groups * by_group).reshape(codes.shape)


def split_groups(
    weight: np.ndarray, quantisation: Quantisation, scale_shape: tuple[int, ...]
) -> np.ndarray:
    """A part of a weight as four axes: outer features, groups, members of a group, features."""
    axis = len(scale_shape) + quantisation.inputs[-1]
    outer, features = math.prod(scale_shape[:axis]), math.prod(scale_shape[axis + 1 :])
    return weight.reshape(outer, scale_shape[axis], -1, features)
