"""A bounded parser of the headers of GGUF files.

The header has the layout of ggml's docs/gguf.md, versions 2 and 3. noria has its own parser because
the reader of the package `gguf` needs tens of seconds for a vocabulary of 262k strings, and hangs
on wrong counts. ggml lists axes minor to major; shapes here are in numpy's order. Metadata are
returned as plain values. Does not know about architectures or tokenizers.

Guarantees: any byte string either parses or raises `InvalidGGUF`, in time and memory proportional
to the file. Every count is checked against the remaining bytes before memory is allocated, and no
two tensors share a byte.
"""

import math
import mmap
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import InvalidGGUF
from ..tensor_source import TensorInfo

MAX_METADATA_KEYS = 65_536
MAX_TENSORS = 100_000
MAX_RANK = 8
MAX_NAME_BYTES = 1024
MAX_ARRAY_ITEMS = 2**23
"""The largest number of items in all arrays together; a vocabulary has about a million."""
MAX_ALIGNMENT = 2**20
MAX_AXIS = 2**40

# number in the file: (name, elements per block, bytes per block)
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
NOT_READ_TYPES = {9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
                  40: "NVFP4"}  # fmt: skip

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "B",
    10: "Q",
    11: "q",
    12: "d",
}
"""The letter of `struct` and numpy for each value type in the file."""


@dataclass(frozen=True)
class GGUFTensor:
    """The place of a tensor: its absolute offset in the file, and its shape in numpy's order."""

    info: TensorInfo
    type_number: int
    offset: int


@dataclass(frozen=True)
class GGUFHeader:
    """The content of a file before the tensor data."""

    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    num_bytes: int


def read_header(path: Path) -> GGUFHeader:
    """Parse the header of a file.

    Raises:
      InvalidGGUF: The file is not a GGUF file that can be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < 24:
            raise InvalidGGUF(f"{path}: expected at least 24 bytes, got {size}. Fetch it again.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as buffer:
            return parse_header(buffer, str(path))


def parse_header(buffer: bytes | mmap.mmap, where: str = "GGUF data") -> GGUFHeader:
    """Parse the header in a buffer with the whole file; `where` begins error messages."""
    cursor = _Cursor(buffer, where)
    magic = cursor.take(4)
    if magic != b"GGUF":
        hint = " of a pointer of Git LFS: fetch the file itself" if magic == b"vers" else ""
        raise cursor.error("the magic b'GGUF'", f"{magic}{hint}", at=0)
    version = cursor.scalar("I")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        hint = " (big-endian, not supported)" if swapped in (2, 3) else ""
        raise cursor.error("version 2 or 3", f"{version}{hint}", at=4)
    # the shortest tensor entry has 32 bytes, the shortest metadata entry 13
    num_tensors = cursor.count(32, MAX_TENSORS, "tensors")
    num_keys = cursor.count(13, MAX_METADATA_KEYS, "metadata keys")

    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
        at = cursor.position
        key = cursor.string(MAX_NAME_BYTES)
        if key in metadata:
            raise cursor.error("each metadata key once", f"{key!r} twice", at=at)
        metadata[key] = cursor.value()

    entries = _read_entries(cursor, num_tensors)
    alignment = _alignment(cursor, metadata)
    data_start = -(-cursor.position // alignment) * alignment
    tensors = {
        name: GGUFTensor(tensor.info, tensor.type_number, data_start + tensor.offset)
        for name, tensor in entries.items()
    }
    _check_ranges(cursor, alignment, tensors)
    return GGUFHeader(metadata, tensors, data_start)


class _Cursor:
    """A position in a buffer, which reads and allocates nothing beyond the end of the buffer."""

    def __init__(self, buffer: bytes | mmap.mmap, where: str):
        self.buffer = buffer
        self.size = len(buffer)
        self.where = where
        self.position = 0
        self._items_left = MAX_ARRAY_ITEMS

    def error(self, expected: str, got: object, *, at: int | None = None) -> InvalidGGUF:
        offset = self.position if at is None else at
        return InvalidGGUF(f"{self.where}: at byte {offset}: expected {expected}, got {got}.")

    def take(self, count: int) -> bytes:
        start = self.position
        if count > self.size - start:
            raise self.error(f"{count} more bytes", f"{self.size - start} to the end of the file")
        self.position = start + count
        return self.buffer[start : self.position]

    def scalar(self, letter: str) -> Any:
        data = self.take(struct.calcsize(letter))
        return struct.unpack(f"<{letter}", data)[0]

    def count(self, min_bytes: int, limit: int, what: str) -> int:
        """Read a count of items of at least `min_bytes` each, and check that the file has them."""
        at = self.position
        number = self.scalar("Q")
        limit = min(limit, (self.size - self.position) // min_bytes)
        if number > limit:
            raise self.error(f"at most {limit} {what}", number, at=at)
        return number

    def string(self, limit: int | None = None) -> str:
        at = self.position
        length = self.count(1, self.size if limit is None else limit, "bytes of text")
        try:
            return self.take(length).decode("utf-8")
        except UnicodeDecodeError as problem:
            raise self.error("UTF-8 text", problem, at=at) from problem

    def value(self) -> Any:
        at = self.position
        kind = self.scalar("I")
        if kind == ARRAY:
            return self._array()
        return self._scalar_or_string(kind, at)

    def _scalar_or_string(self, kind: int, at: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind not in SCALARS:
            raise self.error("a value type from 0 to 12", kind, at=at)
        at = self.position
        value = self.scalar(SCALARS[kind])
        if kind != BOOL:
            return value
        if value > 1:
            raise self.error("a boolean of 0 or 1", value, at=at)
        return bool(value)

    def _array(self) -> list[Any]:
        at = self.position
        kind = self.scalar("I")
        if kind != STRING and kind not in SCALARS:
            raise self.error("an array of scalars or strings", f"element type {kind}", at=at)
        min_bytes = 8 if kind == STRING else struct.calcsize(SCALARS[kind])
        length = self.count(min_bytes, self._items_left, "array items")
        self._items_left -= length
        if kind == STRING:
            return self._strings(length)
        at = self.position
        values = np.frombuffer(self.take(length * min_bytes), f"<{SCALARS[kind]}")
        if kind != BOOL:
            return values.tolist()
        if values.max(initial=0) > 1:
            raise self.error("booleans of 0 or 1", values.max(), at=at)
        return values.astype(bool).tolist()

    def _strings(self, length: int) -> list[str]:
        """Read `length` strings, as `string` does, but fast for hundreds of thousands of them."""
        buffer, size, position = self.buffer, self.size, self.position
        start = position
        unpack = struct.Struct("<Q").unpack_from
        result = []
        try:
            for _ in range(length):
                start = position + 8
                position = start + unpack(buffer, position)[0]
                if position > size:
                    raise self.error(
                        f"at most {size - start} bytes of text", position - start, at=start - 8
                    )
                result.append(buffer[start:position].decode("utf-8"))
        except struct.error:
            raise self.error("8 more bytes", "the end of the file", at=position) from None
        except UnicodeDecodeError as problem:
            raise self.error("UTF-8 text", problem, at=start) from problem
        self.position = position
        return result


def _read_entries(cursor: _Cursor, num_tensors: int) -> dict[str, GGUFTensor]:
    """Read the tensor entries, with offsets relative to the start of the data."""
    entries: dict[str, GGUFTensor] = {}
    for _ in range(num_tensors):
        at = cursor.position
        name = cursor.string(MAX_NAME_BYTES)
        if name in entries:
            raise cursor.error("each tensor once", f"{name!r} twice", at=at)
        at = cursor.position
        rank = cursor.scalar("I")
        if not 1 <= rank <= MAX_RANK:
            raise cursor.error(f"{name!r} to have 1 to {MAX_RANK} axes", rank, at=at)
        at = cursor.position
        shape = tuple(cursor.scalar("Q") for _ in range(rank))[::-1]
        if not all(1 <= axis <= MAX_AXIS for axis in shape):
            raise cursor.error(f"{name!r} to have axes from 1 to {MAX_AXIS}", shape, at=at)
        at = cursor.position
        number = cursor.scalar("I")
        if number not in TENSOR_TYPES:
            supported = ", ".join(kind for kind, _, _ in TENSOR_TYPES.values())
            got = NOT_READ_TYPES.get(number, f"unknown type {number}")
            raise cursor.error(f"{name!r} to be of type {supported}", got, at=at)
        kind, block_size, block_bytes = TENSOR_TYPES[number]
        if shape[-1] % block_size:
            raise cursor.error(
                f"{name!r} ({kind}) to have rows of a multiple of {block_size}", shape[-1], at=at
            )
        # Python's integers do not overflow: a wrong product is a range outside the file
        num_bytes = math.prod(shape) // block_size * block_bytes
        info = TensorInfo(shape, np.dtype(np.float32), kind, num_bytes)
        entries[name] = GGUFTensor(info, number, cursor.scalar("Q"))
    return entries


def _alignment(cursor: _Cursor, metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    plain = isinstance(alignment, int) and not isinstance(alignment, bool)
    if not plain or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise cursor.error(
            f"general.alignment to be a power of two up to {MAX_ALIGNMENT}", repr(alignment)[:80]
        )
    return alignment


def _check_ranges(cursor: _Cursor, alignment: int, tensors: Mapping[str, GGUFTensor]) -> None:
    """Check that tensors are aligned, inside the file, and do not overlap."""
    end, previous = 0, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].offset):
        stop = tensor.offset + tensor.info.num_bytes
        if tensor.offset % alignment:
            raise cursor.error(f"{name!r} at a multiple of {alignment}", f"offset {tensor.offset}")
        if stop > cursor.size:
            raise cursor.error(
                f"{name!r} to end within the file ({cursor.size} bytes)",
                f"its end at {stop}: the file is cut off, fetch it again",
            )
        if tensor.offset < end:
            raise cursor.error(f"{name!r} to start after {previous!r} ends ({end})", tensor.offset)
        end, previous = stop, name
