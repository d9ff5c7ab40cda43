"""Count host arrays of loaders as long as anything refers to them."""

import threading
import weakref
from collections.abc import Sequence

import numpy as np


class CountedArrays:
    """Makes arrays of zeros, and records the largest number alive at once.

    No array begins at an address that is aligned as jax asks. So devices of the CPU copy arrays, as
    other devices do, and hold none of them.
    """

    def __init__(self):
        self.most = self.num_made = self._alive = 0
        # a finaliser may run anywhere, also in a thread that holds this lock
        self._lock = threading.RLock()

    def zeros(self, shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
        size = int(np.prod(shape))
        memory = np.zeros(size + 64, dtype)
        start = -memory.ctypes.data % 64 // dtype.itemsize + 1
        with self._lock:
            self._alive += 1
            self.num_made += 1
            self.most = max(self.most, self._alive)
        weakref.finalize(memory, self._gone)
        return memory[start : start + size].reshape(shape)

    def _gone(self) -> None:
        with self._lock:
            self._alive -= 1
