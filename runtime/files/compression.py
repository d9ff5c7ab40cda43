"""Reads and writes gzip and Zstandard files as streams of bytes.

Does not know what the files contain. Guarantees: a file that is damaged or cut off is an error,
never a shorter file; equal content is compressed to equal bytes.
"""

import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from ..errors import InputError, UnusableFile
from .optional_packages import require

_SUFFIXES = (".gz", ".zst")
_PIECE_BYTES = 2**14
"""The number of compressed bytes that are decompressed at once; a piece may grow a lot."""
_MAX_WINDOW_LOG = 31
_GZIP_FORMAT = 31
"""The number by which zlib knows gzip's header, with the largest window."""


def compression_of(path: Path) -> str:
    """The suffix of a compressed file; empty for other files."""
    suffix = path.suffix.lower()
    return suffix if suffix in _SUFFIXES else ""


def without_compression(path: Path) -> Path:
    """The path without the suffix of its compression; it shows the format of the content."""
    return path.with_suffix("") if compression_of(path) else path


def check_compression(path: Path) -> None:
    """Check that the package which a file's compression needs is installed.

    Raises:
        UnusableFile: It is not.
    """
    if compression_of(path):
        _codec(path)


def decompressed(path: Path, file: BinaryIO) -> BinaryIO:
    """The content of a file, open at its beginning, whose path says how it is compressed."""
    if not compression_of(path):
        return file
    return cast(BinaryIO, io.BufferedReader(_Pieces(path, file), 2**20))


def compress(path: Path, chunks: Iterable[bytes]) -> Iterator[bytes]:
    """The content of a file with these chunks, compressed as its suffix says."""
    if not compression_of(path):
        yield from chunks
        return
    stream = _codec(path).compressor()
    for chunk in chunks:
        if piece := stream.compress(chunk):
            yield piece
    yield stream.flush()


class _Pieces(io.RawIOBase):
    """A raw stream over the decompressed pieces of a file."""

    def __init__(self, path: Path, file: BinaryIO):
        self._pieces = _decompress(path, file)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            if (piece := next(self._pieces, None)) is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


@dataclass(frozen=True)
class _Codec:
    """A compressed format: its name, and a library's constructors of streams and error."""

    name: str
    compressor: Callable[[], Any]
    decompressor: Callable[[], Any]
    error: type[Exception]


def _decompress(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """The decompressed pieces of a file, which may consist of several streams."""
    codec = _codec(path)
    stream: Any = None
    has_ended = False
    while piece := file.read(_PIECE_BYTES):
        # gzip files may end with zeros, as on tapes
        while piece and not (has_ended and not piece.strip(b"\0")):
            if stream is None:
                stream, has_ended = codec.decompressor(), False
            try:
                content = stream.decompress(piece)
            except codec.error as error:
                raise InputError(
                    f"{path}: expected {codec.name}, as its name says, got damaged or other "
                    f"content ({error}). Write the file again, or give it its true name."
                ) from None
            if content:
                yield content
            piece = b""
            if stream.eof:
                piece, stream, has_ended = stream.unused_data, None, True
    if not has_ended:
        raise InputError(
            f"{path}: expected a complete compressed file, got one that is cut off. Copy it again."
        )


def _codec(path: Path) -> _Codec:
    if compression_of(path) == ".gz":
        return _Codec(
            "gzip",
            lambda: zlib.compressobj(wbits=_GZIP_FORMAT),
            lambda: zlib.decompressobj(_GZIP_FORMAT),
            zlib.error,
        )
    try:
        package = require("zstandard", "zstd", UnusableFile)
    except UnusableFile as error:
        raise UnusableFile(f"{path}: {error}") from None
    return _Codec(
        "Zstandard",
        lambda: package.ZstdCompressor().compressobj(),
        lambda: package.ZstdDecompressor(max_window_size=2**_MAX_WINDOW_LOG).decompressobj(),
        package.ZstdError,
    )
