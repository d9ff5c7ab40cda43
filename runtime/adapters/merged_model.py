"""A model with an adapter merged into its weights.

Weights are merged as they are read: box by box, in float32, under their published names. So
everything that follows, such as rounding to codes and distribution over devices, is as for a model
that was merged before. Does not know parameters, dtypes or devices.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...modelzoo.families.mapping import ParameterSource
from ..checkpoint import ModelFiles, open_model
from ..checkpoint.coverage import filled_shape
from ..checkpoint.generation_defaults import GenerationDefaults
from ..checkpoint.loader import read_parameter
from ..checkpoint.published_tensors import publish
from ..checkpoint.tensor_source import Index, TensorInfo, TensorSource
from ..checkpoint.unread_parts import UnreadParts
from ..errors import InvalidAdapter
from .adapter import CONFIG, WEIGHTS, Adapter, AdapterWeights, LoraPair, check_shape

if TYPE_CHECKING:
    from ...modelzoo.families.family import ModelSpec

_FLOAT32 = np.dtype(np.float32)


class MergedModel(ModelFiles):
    """A model whose tensors have an adapter merged into them.

    It has the fingerprint of the model, as it differs in its numbers only, so plans and bundles of
    the model fit. The digest of its weights includes the adapter.
    """

    def __init__(self, model: ModelFiles, adapter: Adapter):
        super().__init__(model.path, model.name)
        self.kind, self.published_config = model.kind, model.published_config
        self._model, self._adapter = model, adapter

    @cached_property
    def spec(self) -> "ModelSpec":
        return published_spec(self._model)

    @cached_property
    def tensors(self) -> TensorSource:
        tensors = published_tensors(self._model, self.spec)
        weights = self._adapter.weights(self.spec, tensors)
        return MergedTensors(tensors, weights, self._adapter.path)

    @cached_property
    def stored_tensors(self) -> TensorSource:
        return self._model.stored_tensors

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        return self._model.generation_defaults

    @cached_property
    def tokenizer_files(self) -> Path | Mapping[str, Any]:
        return self._model.tokenizer_files

    @cached_property
    def unread(self) -> UnreadParts:
        return self._model.unread

    def weight_files(self) -> Mapping[str, Path]:
        files = {name: self._adapter.path / name for name in (CONFIG, WEIGHTS)}
        return {**self._model.weight_files(), **{f"adapter/{k}": v for k, v in files.items()}}

    def fingerprint(self) -> str:
        return self._model.fingerprint()

    def _descriptions(self) -> Iterable[tuple[str, bytes]]:
        raise NotImplementedError("the fingerprint is that of the model")

    def close(self) -> None:
        self._model.close()


class MergedTensors:
    """Published tensors with an adapter merged into some of them, in float32."""

    def __init__(self, tensors: TensorSource, weights: AdapterWeights, path: Path):
        """Create the source.

        Args:
          tensors: The tensors of the model.
          weights: The numbers of the adapter.
          path: The adapter, for messages.

        Raises:
          InvalidAdapter: The shapes of a tensor and of the adapter's numbers for it differ.
        """
        self._source, self._weights = tensors, weights
        self._row_factors: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()
        infos = dict(tensors.tensors)
        changed = {name: whole.shape for name, whole in weights.whole.items()}
        for name, pair in weights.pairs.items():
            changed[name] = len(pair.up_OR), pair.down_RI.shape[1]
        for name, shape in changed.items():
            if name not in infos:
                raise InvalidAdapter(f"{path}: expected {name} in the model, got no such tensor.")
            check_shape(path, name, infos[name].shape, shape)
            infos[name] = replace(infos[name], dtype=_FLOAT32)
        self.tensors = infos

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Read a tensor or a box of it."""
        pair, whole = self._weights.pairs.get(name), self._weights.whole
        box = index or (slice(None),) * len(self.tensors[name].shape)
        base = np.array(whole[name][box]) if name in whole else self._source.read(name, index)
        if pair is None:
            return base
        rows, columns = box
        merged = _sum(base, pair, rows, columns)
        if pair.magnitude_O is not None:
            merged *= self._row_factor(name, pair)[rows, None]
        return merged

    def _row_factor(self, name: str, pair: LoraPair) -> np.ndarray:
        """The factors that give rows the lengths of DoRA; they depend on whole rows."""
        with self._lock:  # or several threads would each read the whole tensor
            if name not in self._row_factors:
                assert pair.magnitude_O is not None
                whole = self._weights.whole.get(name)
                base = self._source.read(name) if whole is None else whole
                norm = np.linalg.norm(_sum(base, pair, slice(None), slice(None)), axis=1)
                self._row_factors[name] = (pair.magnitude_O / norm).astype(np.float32)
            return self._row_factors[name]


def _sum(base: np.ndarray, pair: LoraPair, rows: slice, columns: slice) -> np.ndarray:
    """A box of a weight and of the product of a pair, in float32."""
    product = pair.up_OR[rows] @ pair.down_RI[:, columns]
    return base.astype(np.float32) + np.float32(pair.scale) * product


class PublishedTensors:
    """The tensors of a model of another format, under the names of its Hugging Face form.

    Parameters are read whole, and the latest stays in memory.
    """

    def __init__(
        self,
        tensors: TensorSource,
        own: Iterable[ParameterSource],
        published: Iterable[ParameterSource],
    ):
        """Create the source.

        Args:
          tensors: The tensors of the format.
          own: The sources of all parameters in the format.
          published: The sources of all parameters in the Hugging Face form.

        Raises:
          InvalidAdapter: A parameter cannot be written as published tensors.
        """
        self._source = tensors
        self._own = {source.parameter: source for source in own}
        self._published = {source.parameter: source for source in published}
        self._parameter_of: dict[str, str] = {}
        self._held: tuple[str, Mapping[str, np.ndarray]] = ("", {})
        self._lock = threading.Lock()
        self.tensors: dict[str, TensorInfo] = {}
        for parameter, source in self._published.items():
            zeros = np.broadcast_to(np.float32(0), self._shape(parameter))
            for name, array in self._publish(source, zeros).items():
                self._parameter_of[name] = parameter
                num_bytes = array.size * _FLOAT32.itemsize
                self.tensors[name] = TensorInfo(array.shape, _FLOAT32, "F32", num_bytes)

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Read a tensor or a box of it."""
        parameter = self._parameter_of[name]
        with self._lock:  # or several threads would each hold the parameter
            if self._held[0] != parameter:
                shape, own = self._shape(parameter), self._own[parameter]
                array = read_parameter(own, self._source, None, shape, _FLOAT32)
                self._held = parameter, self._publish(self._published[parameter], array)
            return np.array(self._held[1][name][index or ...])

    def _shape(self, parameter: str) -> tuple[int, ...]:
        return filled_shape(self._own[parameter], self._source)

    @staticmethod
    def _publish(source: ParameterSource, array: np.ndarray) -> Mapping[str, np.ndarray]:
        try:
            return publish(source, array)
        except ValueError as error:
            raise InvalidAdapter(
                f"{error}. Merge the adapter into a Hugging Face directory of the model."
            ) from None


def published_spec(model: ModelFiles) -> "ModelSpec":
    """A model in its Hugging Face form."""
    from ...modelzoo.families.registry import hugging_face_form

    return model.spec if model.kind == "hf" else hugging_face_form(model.spec)


def published_tensors(model: ModelFiles, published: "ModelSpec") -> TensorSource:
    """The tensors of a model in its Hugging Face form."""
    if model.kind == "hf":
        return model.tensors
    return PublishedTensors(model.tensors, model.spec.sources, published.sources)


def open_merged(model: str | Path, adapter: str | Path | None) -> ModelFiles:
    """Open a model, with an adapter merged into it if one is given.

    Raises:
      CheckpointError: The model or the adapter cannot be used.
    """
    files = open_model(model)
    return files if adapter is None else MergedModel(files, Adapter(Path(adapter)))
