"""Join the tensors of a model directory with those of its modules, which have folders of their own.

A tensor of a module is named `FOLDER/NAME`. Does not know what the modules compute. Guarantees:
pickles are never opened.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np

from ...errors import ModelNotFound
from ...files.small_files import file_inside, has_file
from ..tensor_source import Index, TensorInfo, TensorSource
from .safetensors import PICKLES, SINGLE, SafetensorsFile


def module_weight_files(directory: Path, folders: Iterable[str]) -> dict[str, Path]:
    """The files with the weights of modules, by `FOLDER/FILE`.

    Raises:
      ModelNotFound: A folder has no safetensors.
    """
    return {f"{folder}/{SINGLE}": _file_of(directory / folder) for folder in folders}


class ModuleTensors:
    """The tensors of a directory and of its modules."""

    def __init__(self, model: TensorSource, directory: Path, folders: Iterable[str]):
        self._model = model
        self._homes: dict[str, tuple[SafetensorsFile, str]] = {}
        tensors = dict(model.tensors)
        for folder in folders:
            file = SafetensorsFile(_file_of(directory / folder))
            for name, info in file.tensors.items():
                self._homes[f"{folder}/{name}"] = file, name
                tensors[f"{folder}/{name}"] = info
        self._tensors = tensors

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Read a tensor or a box of it."""
        if name not in self._homes:
            return self._model.read(name, index)
        file, own_name = self._homes[name]
        return file.read(own_name, index)

    def close(self) -> None:
        # a memory map is closed with its last reference
        self._homes.clear()
        self._model.close()


def _file_of(folder: Path) -> Path:
    if has_file(folder, SINGLE):
        return file_inside(folder, SINGLE, ".safetensors", str(folder))
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    remedy = (
        " noria never opens a pickle: save the model again with sentence-transformers, in an "
        "environment you trust."
        if pickles
        else " Fetch the model again."
    )
    raise ModelNotFound(
        f"{folder}: expected {SINGLE}, got {', '.join(pickles) or 'no weights'}.{remedy}"
    )
