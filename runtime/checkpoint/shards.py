"""Arrays made shard by shard: each is read on the host, goes to its devices, and is let go.

Knows nothing of files. Guarantees: where devices have memory of their own, the host holds at most
two shards of an array: the one that is read, and the one before, which jax lets go of at its next
transfer.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .tensor_source import Interval, intervals

if TYPE_CHECKING:
    import jax

ALIGNMENT = 64
"""Bytes; where devices are the CPU, jax adopts a host array that begins at a multiple of it."""

Box = tuple[Interval, ...]


def place_shards(
    shape: tuple[int, ...],
    dtype: np.dtype,
    sharding: "jax.sharding.Sharding",
    read: Callable[[Box], np.ndarray],
) -> "jax.Array":
    """An array whose boxes are read one after the other, each once for all devices that hold it."""
    import jax

    devices: dict[Box, list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        devices.setdefault(intervals(index or (), shape), []).append(device)

    def put(box: Box) -> list[jax.Array]:
        shards = jax.device_put([read(box)] * len(devices[box]), devices[box])
        # a transfer under way still needs its host array: wait, or the next one comes on top
        return jax.block_until_ready(shards)

    shards = [shard for box in devices for shard in put(box)]
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=dtype)


def aligned_zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    # zeros cost no more than empty: the pages of large arrays come zeroed from the system
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = np.zeros(num_bytes + ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    return memory[start : start + num_bytes].view(dtype).reshape(shape)
