"""Formats in which weights are published, found from the headers of a checkpoint.

The format of a parameter follows from those of its tensors and from their axis patterns. Formats of
several tensors of a parameter are joined to one that is exact for all of them. Does not know about
file formats, and reads no weights.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from ....modelzoo.families.mapping import TensorPart
from ....modelzoo.weights.weight_formats import (
    BYTE_DTYPES,
    Quantisation,
    WeightFormat,
    common_format,
)
from ..axis_pattern import AxisPattern
from ..tensor_source import Index, TensorInfo, TensorSource
from .coded_tensors import KeptCodes, Part, ml_dtype

if TYPE_CHECKING:
    from ....modelzoo.families.family import ModelSpec

_LAYER = re.compile(r"^layers\.(\d+)\.")
_ANY_LAYER = "layers.*."


@runtime_checkable
class CodedSource(TensorSource, Protocol):
    """A tensor source with tensors in codes."""

    @property
    def kept(self) -> Mapping[str, KeptCodes]:
        """The codes that a plan may keep, by name; a tensor with plain numbers is not there."""
        ...

    def part(self, part: Part) -> TensorSource:
        """The same tensors, each read as a part of its numbers."""
        ...


class PartOfTensors:
    """A tensor source with one part of the numbers of tensors in codes."""

    def __init__(
        self,
        numbers: Mapping[str, TensorInfo],
        kept: Mapping[str, KeptCodes],
        part: Part,
        read: Callable[[str, Index | None, Part], np.ndarray],
    ):
        """Create the source of a part from the infos of the numbers and a reader of parts."""
        self._part: Part = part
        self._read = read
        self.tensors = {
            name: replace(numbers[name], dtype=_dtype(part, codes.format))
            for name, codes in kept.items()
        }

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        return self._read(name, index, self._part)


def _dtype(part: Part, form: WeightFormat) -> np.dtype:
    if part != "codes":
        return np.dtype(np.float32)
    name = BYTE_DTYPES[form.codes]
    return ml_dtype(name) if name[:5] == "float" else np.dtype(name)


Weights = Mapping[str, tuple[tuple[int, ...], tuple[int, ...] | None]]
"""The shape and the inputs of each parameter; the inputs are None if it is no weight."""


def published_formats(
    spec: "ModelSpec", tensors: TensorSource, weights: Weights
) -> dict[str, WeightFormat]:
    """The format of each weight that can be kept in its codes, by the path of the parameter."""
    if not isinstance(tensors, CodedSource) or not tensors.kept:
        return {}
    found = {}
    for source in spec.sources:
        shape, inputs = weights[source.parameter]
        if inputs is None:
            continue
        quantisation = Quantisation(WeightFormat("int8"), inputs)
        num_inputs = quantisation.num_inputs(shape)
        form = common_format(
            _format_of(part, tensors.kept.get(name), inputs, num_inputs)
            for part in source.parts
            for name in part.tensors
        )
        if form is not None:
            found[source.parameter] = form
    return found


def _format_of(
    part: TensorPart, kept: KeptCodes | None, inputs: tuple[int, ...], num_inputs: int
) -> WeightFormat | None:
    """The format of a tensor as a part of a parameter; None if it cannot be kept."""
    if kept is None:
        return None
    pattern = AxisPattern.of(part)
    if kept.format.is_ordered and any(pattern.target[: inputs[0]]):
        # activations have one order, which all indices of outer axes would have to share
        return None
    names = tuple(name for axis in inputs for name in pattern.target[axis])
    blocks = (1, *kept.blocks) if part.stacked else kept.blocks
    group = None
    for axis, size in zip(pattern.source, blocks, strict=True):
        if not set(axis) & set(names):
            # outputs that share a scale in the file get a scale each
            continue
        if axis != names or size == 1:
            return None
        group = math.gcd(size, num_inputs) if size else 0
    if group is None or group == 1:
        return None
    return replace(kept.format, group=group, is_ordered=kept.format.is_ordered and group > 0)


def by_pattern(
    formats: Mapping[str, WeightFormat], parameters: Iterable[str]
) -> dict[str, WeightFormat]:
    """The formats by path, with one pattern for layers that all have the same format."""
    of_layers = defaultdict(list)
    for parameter in parameters:
        of_layers[_LAYER.sub(_ANY_LAYER, parameter)].append(parameter)
    found = {}
    for pattern, names in of_layers.items():
        present = {name: formats[name] for name in names if name in formats}
        if len(present) == len(names) > 1 and len(set(present.values())) == 1:
            present = {pattern: formats[names[0]]}
        found |= present
    return found
