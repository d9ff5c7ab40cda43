"""Write and read noria's own checkpoints: orbax parameters, config, tokenizer and defaults.

    PATH/params/          the flat dict of parameters, as orbax's StandardCheckpointer writes it
    PATH/tokenizer/       tokenizer files as published, or gguf_metadata.json
    PATH/noria.json       family, config, parameters, generation defaults; written last

Parameters are stored under their names in the model, so the mapping to parameters is the identity.
Does not know about published tensor names. orbax, which takes seconds to import, is needed only to
save. Guarantees: parameters are stored in the canonical arrangement, independent of the layout; a
directory without noria.json is unfinished and refused; a directory whose stored parameters differ
from the list in noria.json is refused before anything is read.
"""

import dataclasses
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...modelzoo.config import AS_PUBLISHED, Arrangement
from ...modelzoo.families.mapping import ParameterSource, TensorPart
from ...modelzoo.layer_groups import single_layer_names
from ..console import plural
from ..errors import InvalidOrbax, UserError
from ..files.disk import Disk, replace_file
from ..files.small_files import (
    MORE_TEMPLATES,
    has_file,
    read_json_object,
    read_small,
    template_files,
)
from .generation_defaults import GenerationDefaults
from .tensor_source import Index, TensorInfo

if TYPE_CHECKING:
    import jax

    from ...modelzoo.config import DecoderConfig
    from ...modelzoo.families.family import ModelSpec

SCHEMA = 1
NORIA_JSON, PARAMS, TOKENIZER = "noria.json", "params", "tokenizer"
GGUF_METADATA = "gguf_metadata.json"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
"""The tokenizer and template files of a published directory."""
QKV = ("attention.qkv", "attention.qkv_bias")
BY_QUERY_HEAD = ("attention.output", "attention.sinks")
TABLES = ("embedding.table", "head.table")


def save_orbax(
    path: str | Path,
    params: "Mapping[str, jax.Array]",
    *,
    family: str,
    config: "DecoderConfig",
    name: str | None = None,
    generation_defaults: GenerationDefaults | None = None,
    tokenizer_files: Path | Mapping[str, Any] | None = None,
) -> None:
    """Save a model into a new or empty directory.

    Args:
      params: All parameters by dotted path, in the canonical arrangement: unrolled layers, without
        copies of key/value heads and without padding of the vocabulary.
      name: The name of the model; the name of the directory by default.
      tokenizer_files: The value of `ModelFiles.tokenizer_files`.

    Raises:
      InvalidOrbax: The directory has files.
      ValueError: More than one process saves, or parameters have another arrangement.
    """
    import jax
    import orbax.checkpoint as ocp

    if jax.process_count() > 1:
        raise UserError(f"save_orbax: expected one process, got {jax.process_count()}.")
    path = Path(path).resolve()
    if path.exists() and any(path.iterdir()):
        raise InvalidOrbax(f"{path}: expected a new or empty directory to save into, got files.")
    _check_arrangement(params, config)
    description = {
        "schema": SCHEMA,
        "name": name or path.name,
        "family": family,
        "config": encode_config(config),
        "parameters": {
            key: {"shape": list(value.shape), "dtype": np.dtype(value.dtype).name}
            for key, value in params.items()
        },
        "generation": (generation_defaults or GenerationDefaults()).as_json(),
    }
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path / PARAMS, dict(params))
    _write_tokenizer(path / TOKENIZER, tokenizer_files)
    _write_whole(path / NORIA_JSON, description)


def _check_arrangement(params: "Mapping[str, jax.Array]", config: "DecoderConfig") -> None:
    """Refuse parameters of stacked layers, and of a layout."""
    if stacked := [name for name in params if single_layer_names(name) != [name]]:
        raise UserError(
            f"save_orbax: expected parameters of single layers, got the stacked parameter "
            f"{stacked[0]}. Load the model without scan_layers."
        )
    for key, value in params.items():
        size, expected = 0, 0
        if key.endswith(TABLES):
            size, expected = value.shape[0], config.vocab_size
        elif key.endswith(QKV):
            attention = config.layers[int(key.split(".")[1])].attention
            size, expected = value.shape[-3], attention and attention.num_kv_heads
        if size != expected:
            raise UserError(
                f"save_orbax: expected {key} without a layout, with {expected} rows or heads, got "
                f"{size}. Load the model on one device."
            )


class OrbaxTensors:
    """The parameters of a saved checkpoint; each is read whole, and the latest is in memory."""

    def __init__(
        self, path: Path, description: Mapping[str, Any], arrangement: Arrangement = AS_PUBLISHED
    ):
        self._path, self._description, self._arrangement = path, description, arrangement
        self._directory = (path / PARAMS).resolve()
        # orbax writes to a temporary name and renames: without this file, the save is unfinished
        if not (self._directory / "_CHECKPOINT_METADATA").is_file():
            raise InvalidOrbax(
                f"{path}: expected a finished orbax checkpoint in {PARAMS}/, got "
                f"{'an unfinished one' if self._directory.exists() else 'none'}. Save it again."
            )
        self._stored = {
            name: _tensor_info(path, name, entry)
            for name, entry in description["parameters"].items()
        }
        self.tensors = {
            name: arranged_info(name, info, arrangement, path / NORIA_JSON)
            for name, info in self._stored.items()
        }
        self._held: tuple[str, np.ndarray] | None = None
        self._lock = threading.Lock()

    def arranged(self, arrangement: Arrangement) -> "OrbaxTensors":
        """The same checkpoint with its parameters in an arrangement."""
        return OrbaxTensors(self._path, self._description, arrangement)

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Read a parameter or a box of it; the parameter stays in memory for further boxes."""
        with self._lock:  # or several threads would each hold the parameter
            if self._held is None or self._held[0] != name:
                self._held, array = None, self._arrays[name]
                with _reporting_damage(self._directory):
                    stored = array.read().result()
                self._held = name, arrange(stored, name, self._arrangement)
            return self._held[1][index or ...]

    def close(self) -> None:
        """Release the parameter in memory; no file stays open between reads."""
        self._held = None

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        """The opened arrays by name; their shapes and dtypes equal those in noria.json."""
        import tensorstore

        # orbax stores zarr arrays in one key-value store (ocdbt); the path is not given as a URL,
        # in which some of its characters would have a meaning
        folder = {"driver": "file", "path": f"{self._directory}/"}
        store = {"driver": "ocdbt", "base": folder}
        with _reporting_damage(self._directory):
            keys = tensorstore.KvStore.open(store).result().list().result()
            names = sorted({key.decode().rpartition("/")[0] for key in keys})
            opening = {
                name: tensorstore.open({"driver": "zarr", "kvstore": {**store, "path": f"{name}/"}})
                for name in names
            }
            arrays = {name: future.result() for name, future in opening.items()}
        stored = {name: (array.shape, array.dtype.numpy_dtype) for name, array in arrays.items()}
        listed = {name: (info.shape, info.dtype) for name, info in self._stored.items()}
        if differing := sorted(
            name for name in stored.keys() | listed.keys() if stored.get(name) != listed.get(name)
        ):
            shown = "; ".join(
                f"{name}: expected {listed.get(name)}, got {stored.get(name)}"
                for name in differing[:10]
            )
            raise InvalidOrbax(
                f"{self._directory}: expected the parameters that {NORIA_JSON} lists, got "
                f"{plural(len(differing), 'difference')}: {shown}. Take both from one checkpoint."
            )
        return arrays


@contextmanager
def _reporting_damage(directory: Path) -> Iterator[None]:
    """Turn errors about damaged files, which have no class of their own, into InvalidOrbax."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise InvalidOrbax(
            f"{directory}: expected files that orbax can read, got {type(error).__name__}: {error}."
            f" The files are damaged or incomplete; save the checkpoint again."
        ) from error


def read_description(path: Path) -> dict[str, Any]:
    """Read noria.json; raises InvalidOrbax if it is missing, invalid or of another schema."""
    if not has_file(path, NORIA_JSON):
        raise InvalidOrbax(
            f"{path}: expected {NORIA_JSON}, got none: the save was not finished, or another "
            f"program wrote the checkpoint. Save it again with noria."
        )
    description = read_json_object(path / NORIA_JSON, InvalidOrbax)
    if description.get("schema") != SCHEMA:
        raise InvalidOrbax(
            f"{path / NORIA_JSON}: expected schema {SCHEMA}, got {description.get('schema')!r}."
        )
    for key, kind in {"name": str, "family": str, "config": dict, "parameters": dict}.items():
        if not isinstance(description.get(key), kind):
            raise InvalidOrbax(f"{path / NORIA_JSON}: expected {key!r}, a {kind.__name__}, got "
                               f"{description.get(key)!r:.80}.")  # fmt: skip
    return description


def spec_of(description: Mapping[str, Any]) -> "ModelSpec":
    """Return the spec of a saved model; each parameter is filled by the array of its name."""
    from ...modelzoo.families.family import ModelSpec

    shapes = {name: entry["shape"] for name, entry in description["parameters"].items()}
    config = decode_config(description["config"])
    return ModelSpec(description["family"], config, identity_sources(shapes), ())


def identity_sources(shapes: Mapping[str, Sequence[int]]) -> tuple[ParameterSource, ...]:
    """The sources of parameters of these shapes that are stored under their own names."""
    sources = []
    for name, shape in shapes.items():
        axes = " ".join(f"axis{i}" for i in range(len(shape)))
        sources.append(ParameterSource(name, (TensorPart(name, f"{axes} -> {axes}"),)))
    return tuple(sources)


def read_tokenizer_files(path: Path) -> Path | Mapping[str, Any]:
    """Return the directory of the tokenizer files, or the saved GGUF metadata."""
    folder = path / TOKENIZER
    if folder.is_symlink():
        raise InvalidOrbax(
            f"{folder}: expected the folder of the tokenizer, got a link to {folder.resolve()}. "
            f"Copy the files in if you trust them."
        )
    if has_file(folder, GGUF_METADATA):
        return read_json_object(folder / GGUF_METADATA, InvalidOrbax)
    return folder


def tokenizer_file_names(folder: Path) -> list[str]:
    """The paths of the tokenizer and template files that a folder has, relative to it."""
    names = [name for name in TOKENIZER_FILES if has_file(folder, name)]
    return [*names, *(f"{MORE_TEMPLATES}/{path.name}" for path in template_files(folder))]


def encode_config(value: Any) -> Any:
    """Turn a tree of frozen dataclasses into JSON; the key `type` has the name of the class."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: encode_config(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, tuple):
        return [encode_config(item) for item in value]
    return value


def decode_config(value: Any) -> Any:
    """Restore a tree of a decoder's configuration dataclasses; other classes are refused."""
    from ...modelzoo import config, latent_config, layer_config, pooling_config, rope_config
    from ...modelzoo import moe_config as moe

    if isinstance(value, list):
        return tuple(decode_config(item) for item in value)
    if not isinstance(value, dict):
        return value
    fields = dict(value)
    name = fields.pop("type", None)
    modules = moe, latent_config, layer_config, pooling_config, rope_config, config
    known = {key: kind for module in modules for key, kind in vars(module).items()}
    kind = known.get(name) if isinstance(name, str) else None
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise InvalidOrbax(f"{NORIA_JSON}: config: expected a known type, got {name!r}.")
    try:
        return kind(**{key: decode_config(item) for key, item in fields.items()})
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidOrbax(f"{NORIA_JSON}: config: {name}: {error}") from error


def _tensor_info(path: Path, name: str, entry: Any) -> TensorInfo:
    try:
        shape = tuple(entry["shape"])
        if entry["dtype"] == "bfloat16":
            import ml_dtypes

            dtype = np.dtype(ml_dtypes.bfloat16)
        else:
            dtype = np.dtype(entry["dtype"])
        if not all(isinstance(axis, int) and axis > 0 for axis in shape):
            raise ValueError(f"shape {shape}")
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidOrbax(
            f"{path / NORIA_JSON}: {name!r}: expected shape and dtype, got {entry!r:.80} ({error})."
        ) from error
    info = TensorInfo(shape, dtype, dtype.name, 0)
    return dataclasses.replace(info, num_bytes=info.size * dtype.itemsize)


def arranged_info(
    name: str, info: TensorInfo, arrangement: Arrangement, where: Path | None = None
) -> TensorInfo:
    """A parameter as an arrangement has it; an error names the file `where` with its shape."""
    if not changes_shape(arrangement, name):
        return info
    import jax

    stored = jax.ShapeDtypeStruct(info.shape, info.dtype)
    try:
        shape = jax.eval_shape(
            partial(arrange, parameter=name, arrangement=arrangement), stored
        ).shape
    except (TypeError, ValueError) as error:
        raise InvalidOrbax(
            f"{where}: {name!r}: expected a shape for {arrangement}, got {info.shape}."
        ) from error
    return dataclasses.replace(info, shape=shape)


def changes_shape(arrangement: Arrangement, parameter: str) -> bool:
    """Whether an arrangement changes the shape of a parameter."""
    if parameter.endswith(TABLES):
        return arrangement.padded_vocab is not None
    return parameter.endswith((*QKV, *BY_QUERY_HEAD)) and arrangement.head_shards > 1


def arrange(x: Any, parameter: str, arrangement: Arrangement) -> Any:
    """Arrange a parameter that is in the canonical arrangement."""
    if not changes_shape(arrangement, parameter):
        return x
    array_functions = x.__array_namespace__()
    if parameter.endswith(TABLES):
        V, D = x.shape
        padding = array_functions.zeros((arrangement.padded_vocab - V, D), x.dtype)
        return array_functions.concat([x, padding])
    if parameter.endswith(BY_QUERY_HEAD):
        K, G, *rest = x.shape
        copies = arrangement.kv_copies(K)
        return x.reshape(K * copies, G // copies, *rest)

    *outer, K, J, H = x.shape
    G, copies = J - 2, arrangement.kv_copies(K)
    queries = x[..., :G, :].reshape(*outer, K * copies, G // copies, H)
    key_value = array_functions.repeat(x[..., G:, :], copies, axis=-3)
    return array_functions.concat([queries, key_value], axis=-2)


def _write_tokenizer(directory: Path, files: Path | Mapping[str, Any] | None) -> None:
    directory.mkdir(exist_ok=True)
    if isinstance(files, Mapping):
        kept = {k: v for k, v in files.items() if k.startswith("tokenizer.")}
        _write_whole(directory / GGUF_METADATA, kept)
    elif files is not None:
        for name in tokenizer_file_names(files):
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(read_small(files / name))


def _write_whole(path: Path, content: Mapping[str, Any]) -> None:
    """Write JSON such that the file is either complete or absent."""
    text = json.dumps(content, ensure_ascii=False, indent=1, allow_nan=False)
    replace_file(Disk(), path, [text.encode()])
