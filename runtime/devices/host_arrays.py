"""Arrays between host and devices: the explicit transfers of a run.

Knows nothing of what the arrays mean. With several processes each one puts its own copy, which must
be the same everywhere, and fetches what every device holds whole.
"""

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding


@dataclass(frozen=True)
class HostArrays:
    """Transfers to and from devices on which host arrays lie whole."""

    sharding: Sharding

    def put(self, arrays: Any) -> Any:
        """Host arrays (any pytree) onto the devices."""
        if jax.process_count() == 1:
            return jax.device_put(arrays, self.sharding)
        # device_put would make all processes compare their values, at the cost of a collective each
        return jax.tree.map(self._put_local, arrays)

    def fetch(self, arrays: Any) -> Any:
        """Arrays that lie whole on every device to the host."""
        return jax.device_get(arrays)

    def _put_local(self, array: Any) -> jax.Array:
        array = np.asarray(array)
        return jax.make_array_from_callback(array.shape, self.sharding, lambda index: array[index])
