"""Read the tensors of GGUF files, dequantised row by row to float32, or as codes and scales.

The package `gguf` dequantises the blocks (`gguf.quants`), so it is needed only when numbers are
read. Does not know about architectures or tokenizers.
"""

import itertools
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...files.file_facts import FileStamp
from ...files.optional_packages import require
from ..tensor_source import Index, Interval, TensorInfo, TensorSource, intervals
from .coded_tensors import KeptCodes, Part
from .gguf_codes import CODES
from .gguf_header import TENSOR_TYPES, read_header
from .published_formats import PartOfTensors


class GGUFFile:
    """A `TensorSource` over a GGUF file, with the metadata of the file."""

    def __init__(self, path: Path):
        self._path = path
        self._stamp = FileStamp(path)
        header = read_header(path)
        self.metadata: Mapping[str, Any] = header.metadata
        self.header_bytes = header.num_bytes
        self._entries = header.tensors
        self._tensors = {name: entry.info for name, entry in header.tensors.items()}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Read a box as float32; only its rows are read, and only its blocks are dequantised."""
        return self._read(name, index, _dequantise)

    @property
    def kept(self) -> Mapping[str, KeptCodes]:
        """The codes of tensors that a plan may keep."""
        found = {}
        for name, info in self._tensors.items():
            if info.stored_as in CODES:
                form = CODES[info.stored_as].format
                blocks = (*[1] * (len(info.shape) - 1), form.group)
                found[name] = KeptCodes(replace(form, group=0), blocks)
        return found

    def part(self, part: Part) -> TensorSource:
        """The tensors in codes, each read as a part of its numbers."""
        return PartOfTensors(self._tensors, self.kept, part, self._read_part)

    def _read_part(self, name: str, index: Index | None, part: Part) -> np.ndarray:
        def of_part(stored: np.ndarray, type_number: int) -> np.ndarray:
            kind, _, block_bytes = TENSOR_TYPES[type_number]
            blocks = CODES[kind].unpack(stored.reshape(*stored.shape[:-1], -1, block_bytes))
            if part == "codes":
                return blocks.codes.reshape(*stored.shape[:-1], -1)
            of_groups = blocks.scales
            if part == "offsets":
                given = blocks.offsets
                of_groups = np.zeros_like(of_groups) if given is None else given
            return blocks.of_numbers(of_groups).reshape(*stored.shape[:-1], -1)

        return self._read(name, index, of_part)

    def _read(
        self,
        name: str,
        index: Index | None,
        unpack: Callable[[np.ndarray, int], np.ndarray],
    ) -> np.ndarray:
        """Read a box; `unpack` turns the bytes of whole blocks of a type number into numbers."""
        entry = self._entries[name]
        shape = entry.info.shape
        box = intervals(index or (slice(None),) * len(shape), shape)
        if not all(map(len, box)):
            return np.empty([len(interval) for interval in box], np.float32)

        _, block_size, block_bytes = TENSOR_TYPES[entry.type_number]
        row_bytes = shape[-1] // block_size * block_bytes
        stored = self._read_rows(entry.offset, shape[:-1], row_bytes, box[:-1])

        # whole blocks of the last axis contain the wanted elements, which are cut out afterwards
        first, last = box[-1].start // block_size, -(-box[-1].stop // block_size)
        stored = stored[..., first * block_bytes : last * block_bytes]
        values = unpack(np.ascontiguousarray(stored), entry.type_number)
        origin = first * block_size
        return values[..., box[-1].start - origin : box[-1].stop - origin]

    def close(self) -> None:
        """Do nothing: no file stays open between reads."""

    def _read_rows(
        self, offset: int, shape: tuple[int, ...], row_bytes: int, box: tuple[Interval, ...]
    ) -> np.ndarray:
        """The bytes of a box of rows, as `[*box, row_bytes]`; each contiguous run is one read."""
        if not shape:
            return self._pread(offset, row_bytes)
        strides = [math.prod(shape[axis + 1 :]) * row_bytes for axis in range(len(shape))]
        # axes after the last cut axis are whole, so a run covers them
        cut = max((axis for axis, size in enumerate(shape) if len(box[axis]) < size), default=0)
        starts = itertools.product(*(range(i.start, i.stop) for i in box[:cut]), [box[cut].start])
        run_bytes = len(box[cut]) * strides[cut]
        runs = [
            self._pread(offset + sum(map(operator.mul, start, strides)), run_bytes)
            for start in starts
        ]
        stored = runs[0] if len(runs) == 1 else np.concatenate(runs)
        return stored.reshape(*map(len, box), row_bytes)

    def _pread(self, offset: int, count: int) -> np.ndarray:
        buffer = np.empty(count, np.uint8)
        self._stamp.read(offset, buffer.data)
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
