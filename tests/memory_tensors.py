"""A checkpoint whose tensors are arrays in memory."""

import numpy as np

from noria.runtime.checkpoint.tensor_source import TensorInfo


class Arrays:
    """Tensors in memory, with the interface of a checkpoint."""

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays = arrays
        self.tensors = {
            name: TensorInfo(array.shape, array.dtype, "F32", array.nbytes)
            for name, array in arrays.items()
        }

    def read(self, name, index=None):
        return self.arrays[name] if index is None else self.arrays[name][index]
