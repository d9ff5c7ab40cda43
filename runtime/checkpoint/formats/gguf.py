"""Read the tensors of GGUF files, dequantised row by row to float32, or as codes and scales.

A model may be split into several files, named `model-00001-of-00003.gguf` as llama.cpp writes them.
Each part has the tensors of its own, and the keys `split.no`, `split.count` and
`split.tensors.count`; the first part has all other keys. The package `gguf`
dequantises the blocks (`gguf.quants`), so it is needed only when numbers are read. Does not know
about architectures or tokenizers. Guarantees: every part of a model that is opened is there once,
and in its place.
"""

import itertools
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import CheckpointError
from ...files.file_facts import FileStamp
from ...files.optional_packages import require
from ..tensor_source import Index, Interval, TensorSource, intervals
from .coded_tensors import KeptCodes, Part
from .gguf_codes import CODES
from .gguf_header import TENSOR_TYPES, GGUFHeader, GGUFTensor, read_header
from .published_formats import PartOfTensors

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


class GGUFFile:
    """A `TensorSource` over a GGUF file, or over all parts of a split one, with the metadata.

    Args:
      path: The file, or any part.

    Attributes:
      metadata: The metadata of the file, or of the first part.
      header_bytes: The length of the header of each file, the first part first.
    """

    def __init__(self, path: Path):
        self.header_bytes: dict[Path, int] = {}
        self._entries: dict[str, tuple[FileStamp, GGUFTensor]] = {}
        files = parts_of(path)
        for number, file in enumerate(files):
            stamp, header = FileStamp(file), read_header(file)
            if number == 0:
                self.metadata: Mapping[str, Any] = header.metadata
            if len(files) > 1:
                check_part(file, header, number, len(files), self._entries)
            self.header_bytes[file] = header.num_bytes
            self._entries |= {name: (stamp, entry) for name, entry in header.tensors.items()}
        self.tensors = {name: entry.info for name, (_, entry) in self._entries.items()}
        check_whole(path, self.metadata, len(files), len(self.tensors))

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Read a box as float32; only its rows are read, and only its blocks are dequantised."""
        return self._read(name, index, _dequantise)

    @property
    def kept(self) -> Mapping[str, KeptCodes]:
        """The codes of tensors that a plan may keep."""
        found = {}
        for name, info in self.tensors.items():
            if info.stored_as in CODES:
                form = CODES[info.stored_as].format
                blocks = (*[1] * (len(info.shape) - 1), form.group)
                found[name] = KeptCodes(replace(form, group=0), blocks)
        return found

    def part(self, part: Part) -> TensorSource:
        """The tensors in codes, each read as a part of its numbers."""
        return PartOfTensors(self.tensors, self.kept, part, self._read_part)

    def _read_part(self, name: str, index: Index | None, part: Part) -> np.ndarray:
        def of_part(stored: np.ndarray, type_number: int) -> np.ndarray:
            kind, _, block_bytes = TENSOR_TYPES[type_number]
            blocks = CODES[kind].unpack(stored.reshape(*stored.shape[:-1], -1, block_bytes))
            if part == "codes":
                return blocks.codes.reshape(*stored.shape[:-1], -1)
            of_groups = blocks.offsets if part == "offsets" else blocks.scales
            if of_groups is None:
                of_groups = np.zeros_like(blocks.scales)
            group = blocks.codes.shape[-1] // of_groups.shape[-1]
            return of_groups.repeat(group, axis=-1).reshape(*stored.shape[:-1], -1)

        return self._read(name, index, of_part)

    def _read(
        self,
        name: str,
        index: Index | None,
        unpack: Callable[[np.ndarray, int], np.ndarray],
    ) -> np.ndarray:
        """Read a box; `unpack` turns the bytes of whole blocks of a type number into numbers."""
        stamp, entry = self._entries[name]
        shape = entry.info.shape
        box = intervals(index, shape)
        if not all(map(len, box)):
            return np.empty([len(interval) for interval in box], np.float32)

        _, block_size, block_bytes = TENSOR_TYPES[entry.type_number]
        row_bytes = shape[-1] // block_size * block_bytes
        stored = _read_rows(stamp, entry.offset, shape[:-1], row_bytes, box[:-1])

        # whole blocks of the last axis contain the wanted elements, which are cut out afterwards
        first, last = box[-1].start // block_size, -(-box[-1].stop // block_size)
        stored = stored[..., first * block_bytes : last * block_bytes]
        values = unpack(np.ascontiguousarray(stored), entry.type_number)
        origin = first * block_size
        return values[..., box[-1].start - origin : box[-1].stop - origin]


def _read_rows(
    stamp: FileStamp, offset: int, shape: tuple[int, ...], row_bytes: int, box: tuple[Interval, ...]
) -> np.ndarray:
    """The bytes of a box of rows, as `[*box, row_bytes]`; each contiguous run is one read."""
    if not shape:
        return _pread(stamp, offset, row_bytes)
    strides = [math.prod(shape[axis + 1 :]) * row_bytes for axis in range(len(shape))]
    # axes after the last cut axis are whole, so a run covers them
    cut = max((axis for axis, size in enumerate(shape) if len(box[axis]) < size), default=0)
    starts = itertools.product(*(range(i.start, i.stop) for i in box[:cut]), [box[cut].start])
    run_bytes = len(box[cut]) * strides[cut]
    runs = [
        _pread(stamp, offset + sum(map(operator.mul, start, strides)), run_bytes)
        for start in starts
    ]
    stored = runs[0] if len(runs) == 1 else np.concatenate(runs)
    return stored.reshape(*map(len, box), row_bytes)


def _pread(stamp: FileStamp, offset: int, count: int) -> np.ndarray:
    buffer = np.empty(count, np.uint8)
    stamp.read(offset, buffer.data)
    return buffer


def _dequantise(stored: np.ndarray, type_number: int) -> np.ndarray:
    """Dequantise whole blocks along the last axis of bytes to float32."""
    kind = TENSOR_TYPES[type_number][0]
    if kind == "F32":
        return stored.view("<f4").astype(np.float32, copy=False)
    if kind == "F16":
        return stored.view("<f2").astype(np.float32)
    quants = require("gguf.quants", "gguf")
    return quants.dequantize(stored, require("gguf", "gguf").GGMLQuantizationType(type_number))


def whole_name(path: Path) -> str:
    """The name of the model in a file, without the number of a part."""
    part = _PART.fullmatch(path.name)
    return part[1] if part else path.stem


def parts_of(path: Path) -> list[Path]:
    """All parts of the model of which a file is a part, in order; the file alone if it is whole.

    Raises:
      CheckpointError: A part is missing; the message names it.
    """
    part = _PART.fullmatch(path.name)
    if part is None or not 1 <= int(part[2]) <= int(part[3]):
        return [path]
    name, count = part[1], int(part[3])
    files = [path.with_name(f"{name}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if missing := [file.name for file in files if not file.is_file()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{path}: expected all {count} parts of the model in its folder, got none of the name "
            f"{', '.join(missing[:3])}{more}. Fetch the missing parts, too."
        )
    return files


def check_part(
    path: Path, header: GGUFHeader, number: int, count: int, earlier: Collection[str]
) -> None:
    """Check that a file is the part that its name says, with other tensors than earlier parts.

    Raises:
      CheckpointError: It is not.
    """
    got = header.metadata.get("split.no"), header.metadata.get("split.count")
    if got != (number, count):
        raise CheckpointError(
            f"{path}: expected split.no {number} and split.count {count}, as its name says, got "
            f"{got[0]} and {got[1]}. Give each part the name that it was published with."
        )
    if twice := sorted(header.tensors.keys() & set(earlier)):
        raise CheckpointError(
            f"{path}: expected other tensors than in the parts before it, got {twice[0]} again. "
            f"Give each part the name that it was published with."
        )


def check_whole(path: Path, metadata: Mapping[str, Any], num_files: int, num_tensors: int) -> None:
    """Check that the opened files are a whole model.

    Raises:
      CheckpointError: They are not.
    """
    if (count := metadata.get("split.count") or 1) != num_files:
        raise CheckpointError(
            f"{path}: expected a whole GGUF file, or a name such as MODEL-00001-of-00003.gguf, got "
            f"one of {count} parts with another name. Give each part the name that it was "
            f"published with, or merge them: llama-gguf-split --merge FIRST-PART WHOLE.gguf"
        )
    expected = metadata.get("split.tensors.count", num_tensors)
    if num_tensors != expected:
        raise CheckpointError(
            f"{path}: expected {expected} tensors in all parts, got {num_tensors}. Fetch the parts "
            f"of one model."
        )
