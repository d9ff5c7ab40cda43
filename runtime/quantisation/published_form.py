"""The directory that a quantised model becomes: its config.json, other files and tensors.

A model of a Hugging Face directory keeps its config.json and names. Other models are written in the
published form of their family. Does not know how weights are rounded.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...compile.abstract_model import AbstractModel
from ...compile.weight_rules import WeightRules
from ...modelzoo.config import AS_PUBLISHED, DecoderConfig
from ...modelzoo.families.family import ModelSpec
from ...modelzoo.families.registry import from_hf_config, write_config
from ...modelzoo.weights.weight_formats import SCALES, WeightFormat
from ..checkpoint import ModelFiles
from ..checkpoint.formats.compressed_tensors import Layout, Matrix, quantisation_config
from ..checkpoint.orbax_store import tokenizer_file_names
from ..checkpoint.published_tensors import publish
from ..checkpoint.sentence_modules import module_files, naming_file
from ..errors import InvalidConfig, UserError
from ..files.small_files import read_small
from ..files.strict_json import dump_line
from ..text.gguf_vocabulary import files_from_gguf

Parameters = Mapping[str, np.ndarray]
"""Arrays by dotted path; a weight in codes has codes and scales."""


def pooling_files(files: ModelFiles) -> dict[str, bytes]:
    """The files that say how the model makes a vector of a text, by path; empty without any."""
    return dict(module_files(files.path)) if files.kind == "hf" else {}


class PublishedForm:
    """The published form of a model with weights in codes."""

    def __init__(
        self,
        files: ModelFiles,
        weight_format: WeightFormat,
        dtype: str,
        config: DecoderConfig | None = None,
    ):
        """Describe a model.

        Args:
          files: The model.
          weight_format: The format of weights.
          dtype: The dtype of scales and of weights in float.
          config: The decoder that is written; by default that of the model. It may differ in
            `tie_embeddings`.

        Raises:
          CheckpointError: The model cannot be written in a published form.
          ValueError: A weight cannot have the format.
        """
        self._files, self._format, self._dtype = files, weight_format, dtype
        self._config = config = config or files.spec.config
        # codes have a byte each here, whatever devices pack
        arrangement = replace(AS_PUBLISHED, packs_codes=False)
        definition = AbstractModel(config, arrangement, WeightRules(weight_format))
        self.quantisations = definition.quantisations
        self.abstract = definition.abstract_parameters(jnp.dtype(dtype))
        """The shape and the dtype of all arrays, by dotted path."""
        self._in_float = definition.float_weights
        table, spec = self._written
        self._table, self._sources = table, {source.parameter: source for source in spec.sources}

    @cached_property
    def _written(self) -> tuple[Mapping[str, Any], ModelSpec]:
        """config.json, and the published form that it describes."""
        spec, name = self._files.spec, self._files.name
        if self._files.kind != "hf":
            with naming_file(name):
                return write_config(spec.family, self._config)
        if spec.ignored_prefixes:
            raise InvalidConfig(
                f"{name}: expected a model of text alone, got one with other parts, which would be "
                f"lost. Quantise the text model alone."
            )
        if spec.config.pooling.projections:
            raise InvalidConfig(
                f"{name}: expected a model without dense layers after its pooling, as they would "
                f"be lost, got {len(spec.config.pooling.projections)}. Round the weights while "
                f"they load: --set numbers.weights={self._format.codes}."
            )
        table = self._files.published_config
        if self._config == spec.config:
            if table.get("tie_word_embeddings") and not spec.config.tie_embeddings:
                # the checkpoint has a head of its own
                table = {**table, "tie_word_embeddings": False}
            return table, spec
        table = {**table, "tie_word_embeddings": self._config.tie_embeddings}
        spec = from_hf_config(table)
        if spec.config != self._config:
            raise InvalidConfig(
                f"{name}: expected a family whose head may have a table of its own, got "
                f"{spec.family}. Quantise it without --rotate."
            )
        return table, spec

    @property
    def config(self) -> dict[str, Any]:
        """The table of config.json."""
        end_ids = list(self._files.generation_defaults.eos_ids)
        table = {"eos_token_id": end_ids} if end_ids else {}
        table |= {k: v for k, v in self._table.items() if k not in ("torch_dtype", "dtype")}
        matrices = [path for path in self._in_float if path != "embedding.table"]
        parts = [part for path in matrices for part in self._sources[path].parts]
        names = {name.removesuffix(".weight") for part in parts for name in part.tensors}
        # readers count a tied head as a matrix, although it has no tensor
        ignored = sorted({"lm_head", *names})
        quantisation = quantisation_config(self._format, ignored)
        return {**table, "dtype": self._dtype, "quantization_config": quantisation}

    @property
    def other_files(self) -> dict[str, bytes]:
        """The tokenizer, the chat template, the pooling and the generation defaults, by path."""
        found = self._files.tokenizer_files
        if isinstance(found, Path):
            files = {name: read_small(found / name) for name in tokenizer_file_names(found)}
        else:
            files = files_from_gguf(found)
        defaults = self._files.generation_defaults.as_json()
        return {
            **files,
            **pooling_files(self._files),
            "generation_config.json": dump_line(defaults),
        }

    def layout(self, paths: list[str]) -> Layout:
        """The dtype and the shape of the tensors of weights, by name, in order.

        Raises:
          CheckpointError: A weight has no published form in codes.
        """

        def zeros(leaf: jax.ShapeDtypeStruct) -> np.ndarray:
            return np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape)

        layout: Layout = {}
        for path in paths:
            names = [name for name in (path, path + SCALES) if name in self.abstract]
            arrays = {name: zeros(self.abstract[name]) for name in names}
            try:
                tensors = self.tensors(path, arrays)
            except ValueError as error:
                raise InvalidConfig(
                    f"{self._files.name}: models of the family {self._files.spec.family} with "
                    f"{path} cannot be written in codes: {error}. Set numbers.weights of a plan "
                    f"instead, which rounds weights while they load."
                ) from None
            layout |= {name: (array.dtype.name, array.shape) for name, array in tensors.items()}
        return layout

    def tensors(self, path: str, arrays: Parameters) -> Mapping[str, np.ndarray]:
        """The published tensors of a weight, by name.

        Args:
          path: The dotted path of the weight.
          arrays: The weight in its dtype, or its codes of a byte each and its scales.

        Raises:
          ValueError: A weight in codes has no published form.
        """
        source = self._sources[path]
        tensors = publish(source, arrays[path])
        if path not in self.quantisations:
            return tensors
        for name, codes in tensors.items():
            if codes.ndim != 2:
                raise UserError(
                    f"{name}: expected a matrix for each expert, got one tensor of shape "
                    f"{codes.shape}"
                )
        scales = publish(source, arrays[path + SCALES], is_scales=True)
        stored: dict[str, np.ndarray] = {}
        for name, codes in tensors.items():
            stored |= Matrix(codes, scales[name]).stored(name, self._format)
        return stored
