"""Fill boxes of a parameter on the devices that hold them.

Pieces go to the devices as they were published, and a compiled program turns them and writes them
into the boxes. One program serves all devices and all boxes of a shape. Does not know about files.
Guarantees: the boxes are the only arrays of their size on a device, as the program writes in place;
the host holds a piece until its transfer has ended, and no box; the program moves bits and computes
nothing.
"""

import threading
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from .axis_pattern import Turn
from .turning import Piece


class DeviceBoxes:
    """Boxes of one shape, each on one or several devices, with zeros where no piece is written.

    All boxes are one array, which is split over the devices along its first axis.
    """

    def __init__(self, shape: Sequence[int], dtype: np.dtype, devices: Sequence[Sequence[Any]]):
        """Create the boxes; `devices` has the devices of each box."""
        self._dtype = dtype
        self._devices = devices
        everywhere = [device for of_box in devices for device in of_box]
        mesh = jax.sharding.Mesh(everywhere, ("device",), axis_types=(AxisType.Auto,))
        self._sharding = NamedSharding(mesh, PartitionSpec("device"))
        self._boxes = _zeros((len(everywhere) * shape[0], *shape[1:]), dtype, self._sharding)
        self._lock = threading.Lock()

    def write(self, pieces: Sequence[Piece]) -> None:
        """Read one piece of each box, all with the same turn, and write them."""
        arrays, starts = [], []
        for piece, devices in zip(pieces, self._devices, strict=True):
            # cast on the host, so that all platforms round alike
            copies = jax.device_put([piece.read_bits(self._dtype)] * len(devices), devices)
            arrays += jax.block_until_ready(copies)
            starts += [piece.start] * len(devices)
        rows, *rest = arrays[0].shape
        bits = jax.make_array_from_single_device_arrays(
            (len(arrays) * rows, *rest), self._sharding, arrays
        )
        start = jax.device_put(np.array(starts, np.int32).reshape(-1), self._sharding)
        with self._lock:  # the array is donated
            self._boxes = _write(self._boxes, bits, start, pieces[0].turn, self._sharding)

    def result(self) -> list[jax.Array]:
        """The box on each device, when all pieces are in place."""
        return [shard.data for shard in jax.block_until_ready(self._boxes).addressable_shards]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: NamedSharding) -> jax.Array:
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), sharding)


@partial(jax.jit, donate_argnums=0, static_argnums=(3, 4))
def _write(
    boxes: jax.Array, bits: jax.Array, start: jax.Array, turn: Turn, sharding: NamedSharding
) -> jax.Array:
    """Turn the bits of pieces, and write each into its box at a position along each axis."""

    def write(box: jax.Array, bits: jax.Array, start: jax.Array) -> jax.Array:
        turned = turn(bits)
        turned = turned.reshape((1,) * (box.ndim - turned.ndim) + turned.shape)
        # as integers: some platforms compute bfloat16 in float32, which changes NaN
        box_bits = jax.lax.bitcast_convert_type(box, turned.dtype)
        box_bits = jax.lax.dynamic_update_slice(box_bits, turned, tuple(start))
        return jax.lax.bitcast_convert_type(box_bits, box.dtype)

    spec = sharding.spec
    on_each = jax.shard_map(write, mesh=sharding.mesh, in_specs=spec, out_specs=spec)
    return on_each(boxes, bits, start)
