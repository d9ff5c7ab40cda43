"""Open an adapter of peft on disk, and find the weight of the model that each tensor belongs to.

An adapter is a folder with adapter_config.json and adapter_model.safetensors. The names of its
tensors begin with `base_model.model.` and the name of a module as transformers has it, from which
the published name of the module's weight follows. Does not know parameters. Guarantees: an adapter
that does not fit the model is refused before any weight is read, and the message names the module.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from ...modelzoo.families.family import ModelSpec
from ...modelzoo.families.registry import family_of
from ...modelzoo.families.wholes import PREFIXES
from ..checkpoint.axis_pattern import AxisPattern
from ..checkpoint.formats.safetensors import PICKLES, SafetensorsFile
from ..checkpoint.tensor_source import TensorSource
from ..errors import InvalidAdapter, InvalidSafetensors
from ..files.small_files import file_inside, has_file, read_json_object, read_small
from .adapter_config import AdapterConfig, read_adapter_config

_HEADS = {"classifier", "score"}
_TABLES = {"embed_tokens", "lm_head"}
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BEGINNING = "base_model.model."
_ENDS = {
    ".lora_A.weight": "down",
    ".lora_B.weight": "up",
    ".lora_embedding_A": "up",
    ".lora_embedding_B": "down",
    ".lora_magnitude_vector": "magnitude",
    ".lora_magnitude_vector.weight": "magnitude",
    ".base_layer.weight": "whole",
    ".weight": "whole",
}
"""The ends of the names of tensors, and the roles of the tensors. A table of embeddings is a weight
with tokens as output features, so its matrices have the other roles, and are transposed."""
_TRANSPOSED = (".lora_embedding_A", ".lora_embedding_B")
_MATRIX_AXES = 2


@dataclass(frozen=True)
class LoraPair:
    """The matrices whose product an adapter adds to a weight of O output and I input features.

    They are float32.

    The weight becomes `W + scale * up @ down`. With a magnitude, its rows are then scaled to these
    lengths (DoRA: Liu et al. 2024, 2402.09353, equation 5).
    """

    down_RI: np.ndarray
    up_OR: np.ndarray
    scale: float
    magnitude_O: np.ndarray | None = None

    @property
    def rank(self) -> int:
        """The rank of the product of the matrices."""
        return len(self.down_RI)


@dataclass(frozen=True)
class AdapterWeights:
    """The numbers of an adapter, by the published name of the weight that they change."""

    pairs: Mapping[str, LoraPair]
    whole: Mapping[str, np.ndarray]
    """Weights that replace those of the model, before pairs are added."""


class Adapter:
    """An adapter on disk."""

    def __init__(self, path: Path):
        """Open a folder.

        Raises:
          InvalidAdapter: There is no adapter, or one that is not implemented.
        """
        self.path = path
        if not path.is_dir() or not has_file(path, CONFIG):
            raise InvalidAdapter(
                f"{path}: expected the folder of an adapter, with {CONFIG} and {WEIGHTS}, got "
                f"{'none' if not path.exists() else 'another file or folder'}."
            )
        values = read_json_object(path / CONFIG, InvalidAdapter)
        self.config: AdapterConfig = read_adapter_config(values, str(path / CONFIG))
        if not has_file(path, WEIGHTS):
            pickles = sorted(p.name for p in path.iterdir() if p.suffix in PICKLES)
            remedy = (
                " noria never opens a pickle: save the adapter again with safe_serialization=True."
                if pickles
                else ""
            )
            raise InvalidAdapter(
                f"{path}: expected {WEIGHTS}, got {', '.join(pickles) or 'none'}.{remedy}"
            )

    @cached_property
    def weights_file(self) -> Path:
        """The file with the numbers."""
        return file_inside(self.path, WEIGHTS, str(self.path))

    @cached_property
    def _file(self) -> SafetensorsFile:
        return SafetensorsFile(self.weights_file)

    def fingerprint(self) -> str:
        """The hash, `sha256:...`, of everything in the adapter."""
        digest = hashlib.sha256(b"noria adapter 1\n")
        digest.update(read_small(self.path / CONFIG))
        with self.weights_file.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
        return f"sha256:{digest.hexdigest()}"

    def weights(self, spec: ModelSpec, model: TensorSource) -> AdapterWeights:
        """Read all numbers of the adapter that change the model.

        peft also writes unchanged weights, such as both tables if it added tokens to either one.

        Args:
          spec: The model, in its Hugging Face form.
          model: The published tensors of the model, in the same form.

        Raises:
          InvalidAdapter: The adapter does not fit the model, or a number is not finite.
        """
        tensors = self._modules(spec)
        whole_tensors = dict(tensors)
        if spec.config.has_head and spec.config.tie_embeddings:
            # the embedding is the tensor of the head
            assert spec.names is not None, "the model is in its Hugging Face form"
            whole_tensors[spec.names.head] = spec.embedding_tensor
        self._check_targets(tensors, whole_tensors)
        roles: dict[str, dict[str, str]] = {}
        for name in self._file.tensors:
            module, role = self._role(name, spec)
            if module not in whole_tensors:
                raise self._error(f"expected modules of the model, got tensors of {module!r}")
            roles.setdefault(module, {})[role] = name
        pairs, whole = {}, {}
        for module, names in roles.items():
            if names.keys() == {"whole"} and self._is_copy(
                names["whole"], model, whole_tensors[module]
            ):
                continue
            self._check_module(module, names, spec)
            if "whole" in names:
                whole[tensors[module]] = self._read(names["whole"])
            if "down" in names:
                pairs[tensors[module]] = self._pair(module, names)
        config = self.config
        missing = [m for m in tensors if m not in roles and config.targets_module(m)]
        # patterns may match what peft cannot adapt
        if missing and not isinstance(config.targets, str):
            raise self._error(f"expected matrices of {missing[0]!r}, as its target, got none")
        return AdapterWeights(pairs, whole)

    def _is_copy(self, name: str, model: TensorSource, tensor: str) -> bool:
        """Whether a weight of the adapter has the shape and the numbers of the model's."""
        info = model.tensors.get(tensor)
        if info is None or info.shape != self._file.tensors[name].shape:
            return False
        return np.array_equal(self._read(name), model.read(tensor).astype(np.float32))

    def _modules(self, spec: ModelSpec) -> dict[str, str]:
        """The published matrices, by the modules of the model that the adapter was trained on.

        If the adapter was trained on the model without its head, the names of modules lack the
        prefix that they have below a head. Patterns of the configuration match these names.
        """
        matrices, prefix = _matrices(spec), family_of(spec).hf_prefix
        named = {self._role(name, spec)[0] for name in self._file.tensors}
        bare = {module.removeprefix(prefix): tensor for module, tensor in matrices.items()}
        return bare if named.isdisjoint(matrices) and not named.isdisjoint(bare) else matrices

    def _check_targets(self, modules: Mapping[str, str], saved: Mapping[str, str]) -> None:
        known = {module.split(".")[-1] for module in saved}
        if known & _HEADS:
            # peft names both heads of classifiers, of which a model has one
            known |= _HEADS
        unknown = self.config.unknown_targets(modules)
        unknown += [name for name in self.config.saved if name not in known]
        if unknown:
            ends = sorted({module.rpartition(".")[2] for module in modules})
            raise InvalidAdapter(
                f"{self.config.where}: expected modules of the model ({', '.join(ends)}), got "
                f"{unknown[0]!r}. Take the adapter of this model."
            )

    def _role(self, name: str, spec: ModelSpec) -> tuple[str, str]:
        """The module of a tensor, named as in a model of text alone, and the role of the tensor."""
        end = next((end for end in _ENDS if name.endswith(end)), None)
        if end is None or not name.startswith(_BEGINNING):
            raise self._error(f"expected tensors of LoRA, got {name!r}")
        module = name.removeprefix(_BEGINNING).removesuffix(end)
        for prefix in PREFIXES if spec.ignored_prefixes else ():
            module = prefix.to_standalone(module)
        return module, _ENDS[end]

    def _check_module(self, module: str, names: Mapping[str, str], spec: ModelSpec) -> None:
        """Check that the tensors of a module are those that the configuration asks for."""
        is_table = module.rpartition(".")[2] in _TABLES
        if is_table and spec.config.tie_embeddings:
            raise self._error(
                f"expected no change of {module!r}, as embedding and head of the model are one "
                f"weight, got one. Train the adapter without it"
            )
        is_saved = "whole" in names and "down" not in names
        if is_saved and not (is_table or self.config.saves(module)):
            raise self._error(f"expected {module!r} in modules_to_save, as it has a whole weight")
        if is_saved:
            return
        if not self.config.targets_module(module):
            raise self._error(f"expected no matrices of {module!r}, which is no target, got some")
        expected = {"down", "up"} | ({"magnitude"} if self.config.uses_dora else set())
        if names.keys() - {"whole"} != expected:
            got = ", ".join(names.values())
            raise self._error(f"{module}: expected {len(expected)} tensors of LoRA, got {got}")
        if self.config.uses_dora and names["up"].endswith(_TRANSPOSED):
            raise self._error(f"{module}: expected no DoRA of embeddings, got one")

    def _pair(self, module: str, names: Mapping[str, str]) -> LoraPair:
        down_RI, up_OR = self._read(names["down"]), self._read(names["up"])
        magnitude_O = self._read(names["magnitude"]) if "magnitude" in names else None
        rank = self.config.rank_of(module)
        shapes = f"{names['down']} {down_RI.shape}, {names['up']} {up_OR.shape}"
        if not down_RI.ndim == up_OR.ndim == _MATRIX_AXES or not (
            len(down_RI) == up_OR.shape[1] == rank
        ):
            raise self._error(f"{module}: expected matrices of rank {rank}, got {shapes}")
        if magnitude_O is not None and magnitude_O.shape != up_OR.shape[:1]:
            raise self._error(
                f"{module}: expected {len(up_OR)} magnitudes, got shape {magnitude_O.shape}"
            )
        return LoraPair(down_RI, up_OR, self.config.scale_of(module), magnitude_O)

    def _read(self, name: str) -> np.ndarray:
        try:
            array = self._file.read(name).astype(np.float32)
        except ValueError as error:
            raise InvalidSafetensors(f"{self.weights_file}: {name!r}: {error}") from error
        if not np.isfinite(array).all():
            # rows of other adapters would get NaN, too: zero times infinity
            raise self._error(f"{name}: expected finite numbers, got others")
        return array.T if name.endswith(_TRANSPOSED) else array

    def _error(self, problem: str) -> InvalidAdapter:
        return InvalidAdapter(f"{self.path}: {problem}.")


def check_shape(path: Path, tensor: str, expected: tuple[int, ...], got: tuple[int, ...]) -> None:
    """Refuse numbers of another shape than the weight that they change."""
    if got != expected:
        raise InvalidAdapter(
            f"{path}: expected numbers of {tensor} for its shape {expected}, got {got}. Take the "
            f"adapter of this model."
        )


def _matrices(spec: ModelSpec) -> dict[str, str]:
    """The published matrices of a model, by their modules in a model of text alone."""
    assert spec.names is not None, "the model is in its Hugging Face form"
    prefix = spec.names.prefix
    return {
        prefix.to_standalone(tensor).removesuffix(".weight"): tensor
        for source in spec.sources
        for part in source.parts
        if part.tensor.endswith(".weight")
        and len(AxisPattern.of(part).source) == _MATRIX_AXES + bool(part.stacked)
        for tensor in part.tensors
    }
