"""Read the tensors of a Hugging Face directory: `model.safetensors`, or shards with an index.

The strict reader of the `safetensors` package checks the header. This module also checks what the
package accepts (duplicate keys, large ranks and counts, unusual dtypes) and the index. It slices
tensors itself, as the package does not return eight-bit floats to numpy. Does not know about
parameters or devices.

Guarantees: each listed tensor is in exactly one shard, the one that the index names, and each
tensor in a shard is listed. A directory with both kinds of checkpoint is refused. Pickles (`.bin`,
`.pt`, ...) are never opened.
"""

import math
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...console import plural
from ...errors import CheckpointError, InvalidSafetensors, ModelNotFound
from ...files.file_facts import FileStamp
from ...files.optional_packages import require
from ...files.small_files import file_inside, has_file, parse_json_object, read_json_object
from ..tensor_source import Box, Index, TensorInfo, intervals
from .coded_tensors import ml_dtype

MAX_HEADER_BYTES = 32 * 2**20
MAX_TENSORS = 100_000
MAX_RANK = 8
DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "I64", "I32", "I16", "I8", "U8", "BOOL")
"""The dtypes that a file may have. Parameters are filled from floats of at least 16 bits. F8_E4M3,
U8, I8 and I32 are for the codes, scales, zero points and groups of quantised tensors. Other tensors
are not read."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


_CUT_OFF = "The file is cut off, or a pointer of Git LFS: fetch it again."


class SafetensorsDirectory:
    """The tensors of a directory and of its modules, with one memory map for each file.

    Modules have folders of their own. A tensor of a module is named `FOLDER/NAME`.
    """

    def __init__(self, directory: Path, folders: Iterable[str] = ()):
        shards, weight_map = _find_shards(directory)
        home: dict[str, SafetensorsFile] = {}
        problems: list[str] = []
        for shard, path in shards.items():
            file = SafetensorsFile(path)
            for name in file.tensors:
                if name in home:
                    other = home[name].path.name
                    problems.append(f"{name!r} is in two shards, {other} and {shard}")
                elif weight_map is not None and weight_map.get(name, shard) != shard:
                    problems.append(f"{name!r} is in {shard}, the index says {weight_map[name]}")
                elif weight_map is not None and name not in weight_map:
                    problems.append(f"{name!r} is in {shard} but not in the index")
                home[name] = file
        missing = (weight_map or {}).keys() - home.keys()
        problems += [f"{name!r} is in the index but in no shard" for name in sorted(missing)]
        if problems:
            shown = "\n  ".join(problems[:20])
            raise InvalidSafetensors(
                f"{directory}: expected shards and index to agree, got "
                f"{plural(len(problems), 'difference')}:\n  {shown}\n"
                f"Fetch the index and all shards of one version, or save the model again."
            )
        self._homes = {name: (file, name) for name, file in home.items()}
        for folder in folders:
            file = SafetensorsFile(_file_of(directory / folder))
            self._homes |= {f"{folder}/{name}": (file, name) for name in file.tensors}
        self.tensors = {name: file.tensors[own] for name, (file, own) in self._homes.items()}

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Read a tensor or a box of it; only the bytes of the box are read."""
        file, own_name = self._homes[name]
        return file.read(own_name, index)


def safetensors_files(directory: Path) -> tuple[Path, ...]:
    """The safetensors files of a directory, all inside the directory; none is opened."""
    return tuple(_find_shards(directory)[0].values())


def _find_shards(directory: Path) -> tuple[dict[str, Path], dict[str, str] | None]:
    """Shards by file name, and the map from tensor to shard if there is an index."""
    if has_file(directory, INDEX):
        index_path = directory / INDEX
        weight_map = read_json_object(index_path, InvalidSafetensors).get("weight_map")
        where = f"{index_path}: weight_map"
        if not isinstance(weight_map, dict) or not weight_map:
            raise InvalidSafetensors(f"{where}: expected tensor names with shards, got none.")
        try:
            shards = {
                str(name): file_inside(directory, name, where)
                for name in dict.fromkeys(weight_map.values())
            }
        except (CheckpointError, TypeError) as error:  # TypeError: an unhashable shard "name"
            raise InvalidSafetensors(f"{error}") from error
        if SINGLE not in shards and has_file(directory, SINGLE):
            raise InvalidSafetensors(
                f"{directory}: expected one checkpoint, got two: {SINGLE}, and "
                f"{plural(len(shards), 'shard')} that {INDEX} lists. Programs differ in which they "
                f"read. Move {SINGLE}, or the index and its shards, out of the folder."
            )
        return shards, weight_map
    if has_file(directory, SINGLE):
        return {SINGLE: file_inside(directory, SINGLE, str(directory))}, None
    raise ModelNotFound(_missing_weights(directory))


def _missing_weights(directory: Path) -> str:
    expected = f"{directory}: expected {SINGLE} or {INDEX}, got"
    pickles = sorted(p.name for p in directory.iterdir() if p.suffix in PICKLES)
    if pickles:
        return (
            f"{expected} only pickled weights ({', '.join(pickles[:5])}). A pickle can run any "
            f"program when it is opened, so noria never opens one. Convert the weights in an "
            f"environment you trust: transformers' `AutoModelForCausalLM.from_pretrained(SOURCE)"
            f".save_pretrained(TARGET)` writes safetensors."
        )
    others = sorted(p.name for p in directory.glob("*.safetensors"))
    return f"{expected} {', '.join(others[:5]) if others else 'no weights'}."


class SafetensorsFile:
    """A safetensors file, whose header is checked by the package and against noria's limits."""

    def __init__(self, path: Path):
        package = require("safetensors", "hf")
        self.path = path
        self._stamp = FileStamp(path)
        header = _read_header(path)
        try:
            package.safe_open(path, "np")
        except package.SafetensorError as error:
            raise InvalidSafetensors(
                f"{path}: expected a safetensors file, got {error}. {_CUT_OFF}"
            ) from error
        entries = parse_json_object(header, str(path), InvalidSafetensors)
        entries.pop("__metadata__", None)
        if len(entries) > MAX_TENSORS:
            raise InvalidSafetensors(
                f"{path}: expected at most {MAX_TENSORS} tensors, got {len(entries)}."
            )
        self.tensors = {name: _tensor_info(path, name, entry) for name, entry in entries.items()}
        start = 8 + len(header)
        self._offsets = {name: start + e["data_offsets"][0] for name, e in entries.items()}
        self._bytes = np.memmap(path, np.uint8, "r")

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Read a tensor or a box of it."""
        info, start = self.tensors[name], self._offsets[name]
        box = intervals(index, info.shape)
        if (first := _start_of_run(box, info.shape)) is not None:
            array = np.empty([len(interval) for interval in box], info.dtype)
            offset = start + first * info.dtype.itemsize
            self._stamp.read(offset, array.reshape(-1).view(np.uint8).data)
            return array
        self._stamp.check()
        stored = self._bytes[start : start + info.num_bytes].view(info.dtype).reshape(info.shape)
        return np.array(stored[tuple(interval.as_slice() for interval in box)])


def _start_of_run(box: Box, shape: Sequence[int]) -> int | None:
    """The position of the first element of a box that is contiguous in a tensor; else None."""
    cut = max((axis for axis, size in enumerate(shape) if len(box[axis]) < size), default=0)
    if any(len(interval) != 1 for interval in box[:cut]):
        return None
    return sum(interval.start * math.prod(shape[i + 1 :]) for i, interval in enumerate(box))


def _read_header(path: Path) -> bytes:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            raise InvalidSafetensors(
                f"{path}: expected a safetensors header, got {size} bytes. {_CUT_OFF}"
            )
        (length,) = struct.unpack("<Q", start)
        limit = min(MAX_HEADER_BYTES, size - 8)
        if length > limit:
            raise InvalidSafetensors(
                f"{path}: expected a header of at most {limit} bytes, got {length}. {_CUT_OFF}"
            )
        return file.read(length)


def _tensor_info(path: Path, name: str, entry: dict[str, Any]) -> TensorInfo:
    """Check an entry against noria's limits; the package has checked its offsets."""
    stored_as, shape = entry["dtype"], tuple(entry["shape"])
    if stored_as not in DTYPES:
        raise InvalidSafetensors(
            f"{path}: {name!r}: expected a dtype of {', '.join(DTYPES)}, got {stored_as}."
        )
    if len(shape) > MAX_RANK or 0 in shape:
        raise InvalidSafetensors(
            f"{path}: {name!r}: expected at most {MAX_RANK} axes, none empty, got {len(shape)} "
            f"axes{' with an empty one' if 0 in shape else ''}."
        )
    start, stop = entry["data_offsets"]
    return TensorInfo(shape, _numpy_dtype(stored_as), stored_as, stop - start)


def _numpy_dtype(stored_as: str) -> np.dtype:
    if stored_as in ("BF16", "F8_E4M3"):
        return ml_dtype("bfloat16" if stored_as == "BF16" else "float8_e4m3fn")
    if stored_as == "BOOL":
        return np.dtype(bool)
    kind = {"F": "f", "I": "i", "U": "u"}[stored_as[0]]
    return np.dtype(f"{kind}{int(stored_as[1:]) // 8}")


def module_weight_files(directory: Path, folders: Iterable[str]) -> dict[str, Path]:
    """The files with the weights of modules, by `FOLDER/FILE`.

    Raises:
      ModelNotFound: A folder has no safetensors.
    """
    return {f"{folder}/{SINGLE}": _file_of(directory / folder) for folder in folders}


def _file_of(folder: Path) -> Path:
    if has_file(folder, SINGLE):
        return file_inside(folder, SINGLE, str(folder))
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
