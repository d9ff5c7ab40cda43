"""Fill a box of a parameter on the devices that hold it.

Pieces go to the devices as they were published, and a compiled program turns each and writes it
into the box. Does not know about files. Guarantees: the box is the only array of its size on a
device, as programs write into it in place; the host holds a piece until its transfer has ended, and
no part of the box; the programs move bits and compute nothing.
"""

import threading
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from .axis_pattern import Turn


class DeviceBox:
    """A box on one or several devices, with zeros where no piece is written."""

    def __init__(self, shape: Sequence[int], dtype: np.dtype, devices: Sequence[jax.Device]):
        self._dtype = dtype
        self._devices = devices
        self._arrays = [_zeros(shape, dtype, device) for device in devices]
        self._lock = threading.Lock()

    def write(self, read: np.ndarray, turn: Turn, start: Sequence[int]) -> None:
        # cast on the host, so that all platforms round alike
        read = read.astype(self._dtype, copy=False)
        pieces = jax.block_until_ready(jax.device_put([read] * len(self._devices), self._devices))
        position = np.array(start, np.int32)
        with self._lock:  # the arrays are donated
            self._arrays = [
                _write(array, piece, position, turn)
                for array, piece in zip(self._arrays, pieces, strict=True)
            ]

    def result(self) -> list[jax.Array]:
        """The box on each device, when all pieces are in place."""
        return jax.block_until_ready(self._arrays)


def _zeros(shape: Sequence[int], dtype: np.dtype, device: jax.Device) -> jax.Array:
    with jax.default_device(device):
        return jnp.zeros(shape, dtype)


@partial(jax.jit, donate_argnums=0, static_argnums=3)
def _write(box: jax.Array, read: jax.Array, start: jax.Array, turn: Turn) -> jax.Array:
    """Turn an array, and write it into a box at a position, with one index for each axis."""
    turned = turn(read)
    turned = turned.reshape((1,) * (box.ndim - turned.ndim) + turned.shape)
    return jax.lax.dynamic_update_slice(box, turned, tuple(start))
