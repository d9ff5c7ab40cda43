"""A model whose weights are random: for a directory with a config.json and no weights.

A parameter has the same numbers in every layout and on every machine: they depend on its name and
the seed alone. They are drawn such that activations keep their size from layer to layer. No bias is
zero and no scale is one, so all parameters count.
"""

import copy
import math
import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...modelzoo.config import AS_PUBLISHED, Arrangement
from ..files.small_files import has_file
from .formats.safetensors import INDEX, PICKLES
from .model_files import CONFIG, ModelFiles
from .orbax_store import arrange, arranged_info, identity_sources
from .tensor_source import Index, TensorInfo

if TYPE_CHECKING:
    from ...modelzoo.config import DecoderConfig

RANDOM = "random"
"""The kind of a model with random weights."""
SEED = 0
_SPREAD = 0.1
"""The standard deviation of biases, and of scales around 1."""


def has_no_weights(path: Path) -> bool:
    """Whether a path is a directory with config.json and without weights of any format."""
    if not (path.is_dir() and has_file(path, CONFIG)) or has_file(path, INDEX):
        return False
    weights = (*PICKLES, ".safetensors", ".gguf")
    return not any(file.suffix in weights for file in path.iterdir())


def with_random_weights(files: ModelFiles) -> ModelFiles:
    """The same model with random weights."""
    random, tensors = copy.copy(files), RandomTensors(files.spec.config)
    sources = identity_sources({name: info.shape for name, info in tensors.tensors.items()})
    spec = replace(files.spec, sources=sources, names=None)
    vars(random).update(kind=RANDOM, spec=spec, tensors=tensors)
    return random


class RandomTensors:
    """The parameters of a decoder, with numbers that are drawn whenever they are read."""

    def __init__(self, config: "DecoderConfig", arrangement: Arrangement = AS_PUBLISHED):
        from ...compile.abstract_model import AbstractModel

        self._config, self._arrangement = config, arrangement
        self._weights = AbstractModel(config).weights
        dtype = np.dtype(np.float32)
        drawn = {
            name: TensorInfo(shape, dtype, RANDOM, math.prod(shape) * dtype.itemsize)
            for name, (shape, _) in self._weights.items()
        }
        self.tensors = {
            name: arranged_info(name, info, arrangement) for name, info in drawn.items()
        }

    def arranged(self, arrangement: Arrangement) -> "RandomTensors":
        """The same parameters in an arrangement."""
        return RandomTensors(self._config, arrangement)

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Draw a parameter, and return it or a box of it."""
        shape, inputs = self._weights[name]
        rng = np.random.default_rng([SEED, zlib.crc32(name.encode())])
        drawn = rng.standard_normal(shape, np.float32)
        if inputs is not None:
            drawn *= math.prod(shape[axis] for axis in inputs) ** -0.5
        else:
            drawn = _SPREAD * drawn + name.endswith("scale")
        return arrange(drawn, name, self._arrangement)[index or ...]
