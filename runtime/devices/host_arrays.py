"""The explicit transfers of arrays between host and devices.

With several processes, each process puts its own copy of an array, which must be equal on all of
them, and fetches arrays that are replicated on every device. Does not know what the arrays mean.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding


@dataclass(frozen=True)
class HostArrays:
    """Transfers to and from devices on which host arrays are replicated."""

    sharding: Sharding

    def put(self, arrays: Any) -> Any:
        """Copy a pytree of host arrays to the devices."""
        if jax.process_count() == 1:
            return jax.device_put(arrays, self.sharding)
        # device_put compares the values of all processes, which costs a collective per array
        return jax.tree.map(self._put_local, arrays)

    def fetch(self, arrays: Any) -> Any:
        """Copy a pytree of replicated arrays to the host; waits for the arrays."""
        return jax.device_get(arrays)

    def _put_local(self, array: Any) -> jax.Array:
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, self.sharding, lambda index: array[index])
