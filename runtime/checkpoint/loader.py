"""Fill the parameters of a model from published tensors, and put each on its devices.

Does not know about file formats or families: a `ModelSpec` maps tensors to parameters, and a
`TensorSource` reads tensors. Guarantees: before anything is read, it is checked that each parameter
is filled, that each tensor is used once or ignored by name, and that all shapes agree. In addition
to the returned arrays, the host holds at most two shards and the pieces of tensors that threads
turn. The shards are the one that is being read, and the previous one, which jax releases at its
next transfer. Each of up to `MAX_THREADS` threads has one piece of `PIECE_BYTES`, and its copy in
the dtype of the parameter. Devices with a memory of their own turn float tensors themselves. Then
the host holds no shard, but a piece of `DEVICE_PIECE_BYTES` for each thread. A checkpoint of noria
is read in whole parameters, so the host holds one parameter in addition. A shard of a quantised
weight is read in float32 and rounded to codes. It is read twice if the input features that share a
scale are split over devices. A shard of a weight in published codes is read once for its codes,
once for its scales and once for its offsets. It is checked that scales and offsets are equal for
all features of a group.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from ...modelzoo.config import Arrangement
from ...modelzoo.families.mapping import ParameterSource
from ...modelzoo.layer_groups import single_layer_names
from ...modelzoo.weights.weight_formats import OFFSETS, ORDER, SCALES, Quantisation
from .axis_pattern import AxisPattern
from .coverage import check_coverage
from .formats.coded_tensors import Part
from .formats.published_formats import CodedSource
from .published_weight import PublishedWeight
from .quantiser import WeightQuantiser
from .tensor_source import Box, Index, Interval, TensorSource, intervals, source_of
from .turning import HostBox, Piece, in_threads

if TYPE_CHECKING:
    import jax

    from ...modelzoo.families.family import ModelSpec

    _Placed = tuple[jax.ShapeDtypeStruct, jax.sharding.Sharding]

PIECE_BYTES = 2 * 2**20
"""The number of bytes of a tensor that a thread reads at once."""
DEVICE_PIECE_BYTES = 16 * 2**20
"""The same for pieces that are turned on devices, each of which costs a transfer and a call."""
NOT_QUANTISED: Mapping[str, Quantisation] = MappingProxyType({})


@runtime_checkable
class RearrangeableSource(TensorSource, Protocol):
    """A tensor source whose tensors are parameters, and which reads them in any arrangement."""

    def arranged(self, arrangement: Arrangement) -> TensorSource:
        """Return the same tensors in an arrangement."""
        ...


def load_params(
    spec: "ModelSpec",
    tensors: TensorSource,
    abstract: "Mapping[str, jax.ShapeDtypeStruct]",
    shardings: "Mapping[str, jax.sharding.Sharding] | jax.sharding.Sharding",
    quantisations: Mapping[str, Quantisation] = NOT_QUANTISED,
    turns_on_devices: bool | None = None,
) -> "dict[str, jax.Array]":
    """Load all parameters, by dotted path.

    Args:
      spec: Maps the tensors of the checkpoint to parameters.
      tensors: The tensors of the checkpoint.
      abstract: Shape and dtype of each parameter, by dotted path.
      shardings: One sharding for all parameters, or one for each.
      quantisations: The quantisation of each weight in codes; its scales are another parameter.
      turns_on_devices: Whether devices turn the axes of float tensors; None for all devices whose
        memory is not that of the host.

    Raises:
      CheckpointMismatch: Tensors and parameters do not match; the message lists up to
        `console.MAX_LISTED` differences of each kind. It is raised before anything is read.
    """
    if isinstance(tensors, RearrangeableSource):
        tensors = tensors.arranged(spec.arrangement)
    of_groups = {path + end for path in quantisations for end in (SCALES, OFFSETS, ORDER)}
    weights = {path: leaf for path, leaf in abstract.items() if path not in of_groups}
    check_coverage(spec, tensors, _by_single_layers(weights))
    if not isinstance(shardings, Mapping):
        shardings = dict.fromkeys(abstract, shardings)
    if missing := abstract.keys() - shardings.keys():
        raise ValueError(f"expected a sharding for every parameter, got none for {min(missing)!r}")
    sources = {source.parameter: source for source in spec.sources}
    params = {}
    for path, leaf in weights.items():
        reader = _Reader([sources[name] for name in single_layer_names(path)], tensors, leaf.shape)
        if path not in quantisations:
            sharding, dtype = shardings[path], np.dtype(leaf.dtype)
            on_devices = _has_own_memory(sharding) if turns_on_devices is None else turns_on_devices
            if on_devices and leaf.shape:
                params[path] = _turn_on_devices(leaf, sharding, reader)
            else:
                params[path] = _put_on_devices(leaf, sharding, partial(reader.read, dtype=dtype))
            continue
        quantisation = quantisations[path]
        ends = [end for end in ("", SCALES, OFFSETS, ORDER) if path + end in abstract]
        placed = {end: (abstract[path + end], shardings[path + end]) for end in ends}
        if quantisation.format.is_published:
            weight = PublishedWeight(path, quantisation, leaf.shape, reader.read_part)
            arrays = [
                _put_on_devices(leaf, sharding, partial(weight.read, end, dtype=leaf.dtype))
                for end, (leaf, sharding) in placed.items()
            ]
        else:
            arrays = _load_quantised(reader, quantisation, *placed.values())
        params |= {path + end: array for end, array in zip(ends, arrays, strict=True)}
    return params


@dataclass(frozen=True)
class _Reader:
    """Reads boxes of a parameter, which has one layer or several layers."""

    sources: Sequence[ParameterSource]
    tensors: TensorSource
    shape: tuple[int, ...]

    def read_part(self, part: Part, box: Box, dtype: np.dtype) -> np.ndarray:
        """Read a part of a box of a weight in codes."""
        assert isinstance(self.tensors, CodedSource), "the formats are those of the checkpoint"
        return replace(self, tensors=self.tensors.part(part)).read(box, dtype)

    def read(self, box: Box, dtype: np.dtype) -> np.ndarray:
        """Read a box into the memory of the host."""
        filled = HostBox([len(interval) for interval in box], dtype)
        in_threads(filled.write, self.pieces(box, PIECE_BYTES))
        return filled.array

    def pieces(self, box: Box, max_bytes: int) -> Iterator[Piece]:
        """Cut a box into pieces that read at most `max_bytes` of a tensor."""
        if len(self.sources) == 1:
            yield from _pieces(self.sources[0], self.tensors, self.shape, box, max_bytes)
            return
        layers, *rest = box
        for position, source in enumerate(self.sources[layers.as_slice()]):
            of_layer = _pieces(source, self.tensors, self.shape[1:], tuple(rest), max_bytes)
            for piece in of_layer:
                yield replace(piece, start=(position, *piece.start))


def _load_quantised(
    reader: _Reader, quantisation: Quantisation, codes: "_Placed", scales: "_Placed"
) -> "tuple[jax.Array, jax.Array]":
    """Load the codes and the scales of a weight."""
    (leaf, sharding), (scale_leaf, scale_sharding) = codes, scales
    read = partial(reader.read, dtype=np.dtype(np.float32))
    quantiser = WeightQuantiser(quantisation, leaf.shape, scale_leaf.dtype)
    # of all devices: the scales depend on the whole weight
    indices = sharding.devices_indices_map(leaf.shape).values()
    boxes = {intervals(index or (), leaf.shape) for index in indices}
    if any(map(quantiser.shares_groups, boxes)):
        quantiser.measure((box, read(box)) for box in boxes)

    def read_scales(box: Box) -> np.ndarray:
        return quantiser.scales[tuple(interval.as_slice() for interval in box)]

    in_codes = _put_on_devices(
        leaf, sharding, lambda box: quantiser.codes(box, read(box), leaf.dtype)
    )
    return in_codes, _put_on_devices(scale_leaf, scale_sharding, read_scales)


def _by_single_layers(
    abstract: "Mapping[str, jax.ShapeDtypeStruct]",
) -> "dict[str, jax.ShapeDtypeStruct]":
    """The parameters of each single layer, also of layers that are stacked in one array."""
    return {
        name: leaf if name == path else leaf.update(shape=leaf.shape[1:])
        for path, leaf in abstract.items()
        for name in single_layer_names(path)
    }


def read_parameter(
    source: ParameterSource,
    tensors: TensorSource,
    index: Index | None,
    shape: tuple[int, ...],
    dtype: "np.typing.DTypeLike",
) -> np.ndarray:
    """Read the box `index` of a parameter with the given shape; its parts are joined and cast."""
    return _Reader([source], tensors, shape).read(intervals(index, shape), np.dtype(dtype))


def _pieces(
    source: ParameterSource,
    tensors: TensorSource,
    shape: tuple[int, ...],
    box: Box,
    max_bytes: int,
) -> Iterator[Piece]:
    """Cut a box of a parameter of one layer into pieces of its parts; padding is not in them."""
    if source.padding_rows:
        published = shape[0] - source.padding_rows
        box = (Interval(box[0].start, min(box[0].stop, published)), *box[1:])
    axis, start = source.concat_axis, 0
    for part in source.parts:
        pattern = AxisPattern.of(part)
        part_source = source_of(part, tensors)
        info = part_source.tensors[part.tensor]
        part_shape = pattern.parameter_shape(info.shape)
        stop = start + part_shape[axis] if part_shape else start
        # the overlap of this part with the box, along the axis of concatenation
        low, high = (max(start, box[axis].start), min(stop, box[axis].stop)) if box else (0, 1)
        if low < high:
            # the position of the result's first element, counted in positions of the part
            origin, wanted = [interval.start for interval in box], list(box)
            if box:
                origin[axis] -= start
                wanted[axis] = Interval(low - start, high - start)
            for piece in pattern.pieces(info, tuple(wanted), max_bytes // info.dtype.itemsize):
                index, turn = pattern.plan(info.shape, piece)
                into = tuple(i.start - first for i, first in zip(piece, origin, strict=True))
                yield Piece(part_source, part.tensor, index, turn, into)
        start = stop


def _has_own_memory(sharding: "jax.sharding.Sharding") -> bool:
    """Whether the memory of the devices is not that of the host."""
    return any(device.platform != "cpu" for device in sharding.device_set)


def _put_on_devices(
    leaf: "jax.ShapeDtypeStruct",
    sharding: "jax.sharding.Sharding",
    read: Callable[[Box], np.ndarray],
) -> "jax.Array":
    """Make an array whose boxes are read into the memory of the host, and put on devices."""
    import jax

    devices = _devices_by_box(leaf.shape, sharding)

    def put(box: Box) -> list[jax.Array]:
        shards = jax.device_put([read(box)] * len(devices[box]), devices[box])
        # a running transfer needs its host array: wait, or two host arrays would be alive
        return jax.block_until_ready(shards)

    shards = [shard for box in devices for shard in put(box)]
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards, dtype=leaf.dtype)


def _turn_on_devices(
    leaf: "jax.ShapeDtypeStruct", sharding: "jax.sharding.Sharding", reader: _Reader
) -> "jax.Array":
    """Make an array whose boxes are filled on devices; boxes with equal pieces at the same time."""
    import jax

    from .device_boxes import DeviceBoxes

    devices = _devices_by_box(leaf.shape, sharding)
    groups: dict[Any, dict[Box, list[Piece]]] = {}
    for box in devices:
        pieces = list(reader.pieces(box, DEVICE_PIECE_BYTES))
        alike = tuple(map(len, box)), tuple(piece.turn for piece in pieces)
        groups.setdefault(alike, {})[box] = pieces
    shards = []
    for (shape, _), pieces_by_box in groups.items():
        boxes = DeviceBoxes(shape, np.dtype(leaf.dtype), [devices[box] for box in pieces_by_box])
        in_threads(boxes.write, zip(*pieces_by_box.values(), strict=True))
        shards += boxes.result()
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards, dtype=leaf.dtype)


def _devices_by_box(
    shape: tuple[int, ...], sharding: "jax.sharding.Sharding"
) -> dict[Box, list[Any]]:
    """The devices of this process that hold each box of an array."""
    devices: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices.setdefault(intervals(index or (), shape), []).append(device)
    return devices
