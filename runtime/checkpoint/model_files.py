"""A model on disk in any format: spec, tensors, tokenizer files, defaults and fingerprint.

The formats are Hugging Face directories, GGUF files, and checkpoints of noria. Does not know about
text, devices or requests. Guarantees: no code of a model is run (`auto_map` is dropped), and
opening, describing and fingerprinting import no jax.
"""

import copy
import hashlib
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ...modelzoo.families.config_reader import ConfigReader
from ...modelzoo.families.quantisation import read_quantisation
from ..errors import CheckpointChanged, CheckpointError, InvalidConfig
from ..files.file_facts import FileStamp
from ..files.small_files import has_file, read_json_object, read_small
from ..pods.peers import ALONE, Peers
from .formats.dequantised_tensors import DequantisedTensors, dequantise
from .formats.gguf import GGUFFile
from .formats.safetensors import SafetensorsDirectory, module_weight_files, safetensors_files
from .generation_defaults import GenerationDefaults
from .orbax_store import (
    GGUF_METADATA,
    NORIA_JSON,
    PARAMS,
    TOKENIZER,
    OrbaxTensors,
    read_description,
    read_tokenizer_files,
    spec_of,
    tokenizer_file_names,
)
from .own_head import with_own_head
from .sentence_modules import dense_folders, module_files, naming_file, read_pooling
from .tensor_source import TensorSource
from .unread_parts import UnreadParts, find_unread
from .weights_digest import WeightsDigest

if TYPE_CHECKING:
    from ...modelzoo.families.family import ModelSpec

CONFIG = "config.json"


class ModelFiles(AbstractContextManager["ModelFiles"]):
    """An opened model. Close it when its tensors are loaded, or use it in a `with` block."""

    kind: str
    """The format: `hf`, `gguf` or `orbax`."""
    published_config: Mapping[str, Any]
    """The published configuration: config.json, GGUF metadata, or the config in noria.json."""

    def __init__(self, path: Path, name: str):
        self.path = path
        self.name = name

    @cached_property
    @abstractmethod
    def spec(self) -> "ModelSpec":
        """Family, config and mapping; raises InvalidConfig if no family supports the model."""

    @cached_property
    @abstractmethod
    def tensors(self) -> TensorSource:
        """The tensors that `spec` names, as numbers; quantised tensors are dequantised."""

    @cached_property
    def stored_tensors(self) -> TensorSource:
        """The tensors as the files name and store them; they differ if weights are quantised."""
        return self.tensors

    @cached_property
    @abstractmethod
    def generation_defaults(self) -> GenerationDefaults:
        """End tokens, and the publisher's sampling parameters."""

    @cached_property
    @abstractmethod
    def tokenizer_files(self) -> Path | Mapping[str, Any]:
        """A directory, possibly without a tokenizer, or the metadata of a GGUF file."""

    @cached_property
    def unread(self) -> UnreadParts:
        """Keys and tensors that nothing reads."""
        return UnreadParts(str(self.path))

    def first_layers(self, count: int) -> Self:
        """The same model with only its first `count` layers."""
        first = copy.copy(self)
        vars(first)["spec"] = self.spec.first_layers(count)
        return first

    @abstractmethod
    def weight_files(self) -> Mapping[str, Path]:
        """Return the files that hold weights, by names that a moved or renamed model keeps."""

    @abstractmethod
    def _descriptions(self) -> Iterable[tuple[str, bytes]]:
        """The content of the model except its numbers, as named contents in a fixed order."""

    def fingerprint(self) -> str:
        """Return the fingerprint, `sha256:...`, of everything except the numbers, within a second.

        The hash includes the config, the tokenizer, the generation defaults, the names, dtypes and
        shapes of tensors, and the sizes of weight files. It does not include the name and the path
        of the model. Models that differ in their numbers only have the same fingerprint, and
        different values of `weights_digest`.
        """
        digest = hashlib.sha256(f"noria model 2 {self.kind}\n".encode())
        for name, content in self._descriptions():
            digest.update(f"{name}\0{len(content)}\n".encode())
            digest.update(content)
        for name, path in self.weight_files().items():
            digest.update(f"{name}\0{path.stat().st_size}\n".encode())
        return f"sha256:{digest.hexdigest()}"

    def check_generates(self) -> None:
        """Refuse a model that generates no tokens.

        Raises:
          InvalidConfig: The model only turns texts into vectors.
        """
        if (reason := self.spec.config.lacks_generation) is not None:
            remedy = "Give /v1/embeddings rows to noria batch, or call LLM.embed."
            if self.spec.config.pooling.labels:
                remedy = "Give /v1/classify rows to noria batch."
            raise InvalidConfig(
                f"{self.name}: expected a model that generates tokens, got one for vectors of "
                f"texts: {reason}. {remedy}"
            )

    def weights_digest(self, peers: Peers = ALONE) -> WeightsDigest:
        """Return the digest of all bytes of the weights; its method `start` begins to hash."""
        return WeightsDigest(self.weight_files(), peers)

    def close(self) -> None:
        """Let go of the tensors; their files are closed with the last reference."""
        for name in ("tensors", "stored_tensors"):
            vars(self).pop(name, None)

    def __exit__(self, *_: object) -> None:
        self.close()


class ModelStamp:
    """The facts of weight files and the fingerprint of all other files when a model was opened.

    Commands that read a model for a long time detect later changes with it.
    """

    def __init__(self, files: ModelFiles):
        self._files = files
        self._stamps = [FileStamp(path) for path in files.weight_files().values()]
        self._fingerprint = files.fingerprint()

    def check(self) -> None:
        """Raise `CheckpointChanged` if a file is not the one that was opened."""
        for stamp in self._stamps:
            stamp.check()
        if (now := self._files.fingerprint()) != self._fingerprint:
            raise CheckpointChanged(
                f"{self._files.path}: expected the configuration and the tokenizer as they were "
                f"opened (fingerprint {self._fingerprint}), got others ({now}). They changed while "
                f"the model was read: start again."
            )


class HuggingFaceModel(ModelFiles):
    """A Hugging Face directory with config.json and safetensors."""

    kind = "hf"

    def __init__(self, path: Path, name: str, *, needs_weights: bool = True):
        super().__init__(path, name)
        self.published_config = read_json_object(path / CONFIG)
        # code of a checkpoint is never run, so the address of the code is removed
        self.published_config.pop("auto_map", None)
        self._has_weights = needs_weights
        if needs_weights:
            safetensors_files(path)

    @cached_property
    def spec(self) -> "ModelSpec":
        from ...modelzoo.families.registry import from_hf_config, with_pooling

        names = self.tensors.tensors if self._has_weights else ()
        with naming_file(self.path / CONFIG):
            spec = from_hf_config(self.published_config, names)
        if self._has_weights and isinstance(self.tensors, DequantisedTensors):
            zeros = self.tensors.zero_biases()
            spec = replace(spec, ignored_tensors=(*spec.ignored_tensors, *zeros))
        if spec.config.has_head and spec.config.tie_embeddings:
            spec = self._with_own_head(spec)
        pooling = read_pooling(self.path, spec.config.embed)
        if pooling is not None and not spec.config.pooling.labels:
            dense = (f"{folder}/linear" for folder in dense_folders(self.path))
            spec = with_pooling(spec, pooling, tuple(dense))
        return spec

    def _with_own_head(self, spec: "ModelSpec") -> "ModelSpec":
        try:
            tensors = self.tensors
        except CheckpointError:
            if self._has_weights:
                raise
            return spec  # weights are not needed, and cannot be read
        return with_own_head(spec, tensors)

    @cached_property
    def tensors(self) -> TensorSource:
        with naming_file(self.path / CONFIG):
            quantisation = read_quantisation(ConfigReader(self.published_config))
        return dequantise(self.stored_tensors, quantisation)

    @cached_property
    def unread(self) -> UnreadParts:
        spec, where = self.spec, str(self.path / CONFIG)
        if not self._has_weights:
            return UnreadParts(where, spec.ignored_keys)
        copies = set()
        if isinstance(self.tensors, DequantisedTensors):
            copies.update(self.tensors.zero_biases())
        if spec.config.tie_embeddings:
            copies.add(spec.head_tensor)
        return replace(find_unread(where, spec, self.tensors, copies), keys=spec.ignored_keys)

    @cached_property
    def stored_tensors(self) -> SafetensorsDirectory:
        return SafetensorsDirectory(self.path, dense_folders(self.path))

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        name = "generation_config.json"
        generation = read_json_object(self.path / name) if has_file(self.path, name) else {}
        return GenerationDefaults.from_hf(generation, self.published_config)

    @cached_property
    def tokenizer_files(self) -> Path:
        return self.path

    def weight_files(self) -> Mapping[str, Path]:
        files = {path.name: path for path in sorted(safetensors_files(self.path))}
        return files | module_weight_files(self.path, dense_folders(self.path))

    def _descriptions(self) -> Iterable[tuple[str, bytes]]:
        names = (CONFIG, "generation_config.json", *tokenizer_file_names(self.path))
        yield from _contents(self.path, names)
        yield from module_files(self.path)
        tensors = sorted(self.stored_tensors.tensors.items())
        table = [f"{name}\0{info.stored_as} {info.shape}\n" for name, info in tensors]
        yield "tensors", "".join(table).encode("utf-8", "surrogatepass")


class GGUFModel(ModelFiles):
    """A GGUF file, which contains the whole model."""

    kind = "gguf"

    def __init__(self, path: Path, name: str):
        super().__init__(path, name)
        self._file = GGUFFile(path)
        self.published_config = self._file.metadata

    @cached_property
    def spec(self) -> "ModelSpec":
        from ...modelzoo.families.registry import from_gguf_metadata

        with naming_file(self.path):
            tensors = tuple(self._file.tensors)
            return from_gguf_metadata(self._file.metadata, tensors, self._file.read)

    @cached_property
    def unread(self) -> UnreadParts:
        return find_unread(str(self.path), self.spec, self.tensors)

    @cached_property
    def tensors(self) -> GGUFFile:
        return self._file

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        return GenerationDefaults.from_gguf(self._file.metadata)

    @cached_property
    def tokenizer_files(self) -> Mapping[str, Any]:
        return self._file.metadata

    def weight_files(self) -> Mapping[str, Path]:
        first, *others = self._file.header_bytes
        return {"model.gguf": first} | {f"model-{i}.gguf": p for i, p in enumerate(others, start=2)}

    def _descriptions(self) -> Iterable[tuple[str, bytes]]:
        for path, num_bytes in self._file.header_bytes.items():
            with path.open("rb") as file:
                yield "header", file.read(num_bytes)


class OrbaxModel(ModelFiles):
    """A checkpoint of noria, which `save_orbax` wrote."""

    kind = "orbax"

    def __init__(self, path: Path, name: str):
        self._description = read_description(path)
        super().__init__(path, self._description["name"])
        self.published_config = self._description["config"]
        self._tensors = OrbaxTensors(path, self._description)

    @cached_property
    def spec(self) -> "ModelSpec":
        return spec_of(self._description)

    @cached_property
    def tensors(self) -> OrbaxTensors:
        return self._tensors

    def close(self) -> None:
        self._tensors.close()

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        return GenerationDefaults.from_hf(self._description.get("generation", {}), {})

    @cached_property
    def tokenizer_files(self) -> Path | Mapping[str, Any]:
        return read_tokenizer_files(self.path)

    def weight_files(self) -> Mapping[str, Path]:
        folder = self.path / PARAMS
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path for path in files}

    def _descriptions(self) -> Iterable[tuple[str, bytes]]:
        yield from _contents(self.path, (NORIA_JSON,))
        folder = self.path / TOKENIZER
        yield from _contents(folder, (GGUF_METADATA, *tokenizer_file_names(folder)))


def _contents(folder: Path, names: Iterable[str]) -> Iterable[tuple[str, bytes]]:
    """The names and contents of the named files that exist in a folder."""
    for name in names:
        if has_file(folder, name):
            yield name, read_small(folder / name)
