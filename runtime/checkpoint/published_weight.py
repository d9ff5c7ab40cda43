"""Read the arrays of a weight in published codes: codes, scales, offsets and the order of inputs.

All parts of a tensor are read with the shape of its numbers, so that the axis patterns, layers and
experts of the numbers also hold for the parts. One entry of each group is kept, after a check that
all entries of a group are equal. Does not know about file formats or devices.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property

import numpy as np

from ...modelzoo.weights.weight_formats import OFFSETS, ORDER, SCALES, Quantisation
from ..errors import CheckpointMismatch
from .formats.coded_tensors import Part
from .quantiser import split_groups, weight_box
from .tensor_source import Box, Interval

ReadPart = Callable[[Part, Box, np.dtype], np.ndarray]
"""Reads a part of a box of a weight."""
_PIECE = 2**20
"""The numbers of a weight that are read at once for its groups."""


class PublishedWeight:
    """The arrays of a weight, each read box by box."""

    def __init__(
        self, name: str, quantisation: Quantisation, shape: tuple[int, ...], read: ReadPart
    ):
        """Create the arrays of a weight with a path and a shape from a reader of its parts."""
        self._name, self._quantisation, self._shape = name, quantisation, shape
        self._read_part = read

    def read(self, end: str, box: Box, dtype: np.dtype) -> np.ndarray:
        """Read a box of the array whose path has this end after the path of the weight.

        Raises:
          CheckpointMismatch: The weight is not in the format that its headers say.
        """
        if end == ORDER:
            return self._order_of_layers(len(box) - 1)[box[0].as_slice()].astype(dtype)
        if end in (SCALES, OFFSETS):
            return self._groups("scales" if end == SCALES else "offsets", box).astype(dtype)
        return self._in_order(box, self._read_part("codes", box, dtype))

    def _groups(self, part: Part, box: Box) -> np.ndarray:
        """Read one number for each group of a box, from the numbers of all its features."""
        axis_of_groups = len(box) + self._quantisation.inputs[-1]
        axes = [axis for axis in range(len(box)) if axis != axis_of_groups]
        found = np.empty([len(interval) for interval in box], np.float32)
        num_features = _size(weight_box(self._quantisation, self._shape, box))
        for piece in _pieces(box, axes, num_features):
            features = weight_box(self._quantisation, self._shape, piece)
            numbers = self._read_part(part, features, np.dtype(np.float32))
            sizes = tuple(map(len, piece))
            grouped = split_groups(self._in_order(features, numbers), self._quantisation, sizes)
            self._expect_equal(grouped, grouped[:, :, :1], f"equal {part} in a group")
            index = (own.as_slice(all_.start) for own, all_ in zip(piece, box, strict=True))
            found[tuple(index)] = grouped[:, :, 0].reshape(sizes)
        return found

    @cached_property
    def _order(self) -> np.ndarray:
        """The input feature of each position of the codes, `[*axes before the inputs, inputs]`."""
        whole = tuple(Interval(0, size) for size in self._shape)
        after_inputs = range(len(whole) + self._quantisation.inputs[-1] + 1, len(whole))
        found = None
        for piece in _pieces(whole, after_inputs, _size(whole)):
            groups = self._read_part("groups", piece, np.dtype(np.int32))
            groups = groups.reshape(*self._shape[: self._num_outer], self._num_inputs, -1)
            found = groups[..., :1].copy() if found is None else found
            self._expect_equal(groups, found, "one order of inputs")
        assert found is not None, "a weight has features"
        return np.argsort(found[..., 0], axis=-1, kind="stable")

    def _order_of_layers(self, num_layer_axes: int) -> np.ndarray:
        """The order of each layer; that of the only layer if there is no axis of layers."""
        order = self._order.reshape(*self._shape[:num_layer_axes], -1, self._num_inputs)
        self._expect_equal(order, order[..., :1, :], "one order of inputs")
        return order[..., 0, :]

    def _in_order(self, box: Box, numbers: np.ndarray) -> np.ndarray:
        """The numbers of a box with their inputs in the order of the codes."""
        if not self._quantisation.format.is_ordered:
            return numbers
        outer = box[: self._num_outer]
        order = self._order[tuple(interval.as_slice() for interval in outer)]
        flat = numbers.reshape(*map(len, outer), self._num_inputs, -1)
        return np.take_along_axis(flat, order[..., None], axis=-2).reshape(numbers.shape)

    @property
    def _num_outer(self) -> int:
        """The number of axes before the inputs."""
        return len(self._shape) + self._quantisation.inputs[0]

    @property
    def _num_inputs(self) -> int:
        return self._quantisation.num_inputs(self._shape)

    def _expect_equal(self, found: np.ndarray, one: np.ndarray, expected: str) -> None:
        # the numbers of a block of MXFP4 may all be NaN
        if not np.array_equal(found, np.broadcast_to(one, found.shape), equal_nan=True):
            raise CheckpointMismatch(
                f"{self._name}: expected {expected}, as {self._quantisation.format}, got several. "
                f'Set it to "float" in numbers.rules.'
            )


def _pieces(box: Box, axes: Iterable[int], num_numbers: int) -> Iterator[Box]:
    """Cut a box that needs `num_numbers` numbers into pieces along the longest of some axes."""
    axis = max(axes, key=lambda axis: len(box[axis]), default=None)
    if axis is None:
        yield box
        return
    step = max(1, len(box[axis]) * _PIECE // max(1, num_numbers))
    for start in range(box[axis].start, box[axis].stop, step):
        piece = Interval(start, min(start + step, box[axis].stop))
        yield (*box[:axis], piece, *box[axis + 1 :])


def _size(box: Box) -> int:
    return math.prod(map(len, box))
