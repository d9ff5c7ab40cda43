"""Stores the rows of large tables as blocks, and equal blocks only once.

Does not know what the tables hold.
"""

import numpy as np
import numpy.typing as npt


class Blocks:
    """Different blocks of one width, in the order in which they came. The first is all zeros.

    Args:
      width: The number of entries of a block.
      dtype: The type of an entry.
    """

    def __init__(self, width: int, dtype: npt.DTypeLike):
        self._width, self._dtype = width, np.dtype(dtype)
        self._numbers: dict[bytes, int] = {}
        self.add(np.zeros((1, width), dtype))

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, rows_RX: np.ndarray) -> np.ndarray:
        """The numbers of the blocks of some rows, whose last blocks are completed by zeros."""
        num_rows, num_entries = rows_RX.shape
        num_blocks = -(-num_entries // self._width)
        padded = np.zeros((num_rows, num_blocks * self._width), self._dtype)
        padded[:, :num_entries] = rows_RX
        size = self._width * self._dtype.itemsize
        text, numbers = padded.tobytes(), self._numbers
        found = [
            numbers.setdefault(text[start : start + size], len(numbers))
            for start in range(0, len(text), size)
        ]
        return np.array(found, np.int32).reshape(num_rows, num_blocks)

    def stacked(self) -> np.ndarray:
        """All blocks as one table."""
        return np.frombuffer(b"".join(self._numbers), self._dtype).reshape(-1, self._width)
