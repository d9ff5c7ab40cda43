"""Decides by its name how a file holds rows, and converts it to lines and back.

Names end in `.jsonl` or anything else for lines, in `.csv` or `.tsv` and `.parquet` for tables, and
lines and CSV may be compressed: `.jsonl.gz`, `.csv.zst`. An input that is not plain lines is
converted once into a file without a name, on the disk of the output, because rows are read a second
time by their offset there.

Does not know about requests. Guarantees: memory does not grow with the number of rows; an output is
a function of its lines; a file that cannot be converted whole is an error before any row runs.
"""

import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, cast

from ..errors import InputError, UnusableFile
from ..files.compression import (
    check_compression,
    compress,
    compression_of,
    decompressed,
    without_compression,
)
from ..files.disk import Disk, FileDigest, digest_file, open_nameless
from ..files.file_facts import FileFacts
from ..files.strict_json import Unit
from .input_format import other_format
from .tables import Columns, check_parquet, csv_lines, from_parquet, parquet_lines, to_parquet

_PIECE_BYTES = 2**20


def table_of(path: Path) -> Literal["lines", "csv", "parquet"]:
    """The kind of a file's rows, by the suffix before that of its compression."""
    match without_compression(path).suffix.lower():
        case ".csv" | ".tsv":
            return "csv"
        case ".parquet":
            return "parquet"
        case _:
            return "lines"


def unit_of(path: Path) -> Unit:
    """The unit in which places in a file are counted; lines of a table are its rows."""
    return "line" if table_of(path) == "lines" else "row"


def check_input(path: Path, columns: Columns | None = None) -> None:
    """Check that an input can be read twice, row by row.

    Args:
        path: The input.
        columns: The columns that the user names.

    Raises:
        InputError: The input is absent, is no regular file, has another format, or has no columns.
        UnusableFile: The package for its format is missing.
    """
    if not path.exists():
        raise InputError(f"{path}: expected an input file, got no file.")
    if not path.is_file():
        raise InputError(
            f"{path}: expected a regular file, as the input is read twice, got "
            f"{'a directory' if path.is_dir() else 'a pipe or device'}. Save it to a file first, "
            "or pipe it into -i -."
        )
    if columns not in (None, Columns()) and table_of(path) == "lines":
        raise InputError(
            f"{path}: expected a table (.csv, .tsv or .parquet) with --prompt-column or "
            "--id-column, got JSON Lines, which have keys. Leave the options out."
        )
    if is_plain(path):
        with path.open("rb") as file:
            _check_lines(path, file)
    else:
        _check_packages(path)


def check_output(path: Path) -> None:
    """Check that an output's format can be written.

    Raises:
        UnusableFile: It cannot, or the package for it is missing.
    """
    if table_of(path) == "csv":
        raise UnusableFile(
            f"{path}: expected .jsonl, .jsonl.gz, .jsonl.zst or .parquet for an output, got "
            f"{without_compression(path).suffix}, which cannot hold answers with several parts. "
            "Choose another suffix."
        )
    _check_packages(path)


def is_plain(path: Path) -> bool:
    """Whether rows are read from the file itself, as it has uncompressed lines."""
    return table_of(path) == "lines" and not compression_of(path)


@contextmanager
def open_rows(
    path: Path,
    columns: Columns,
    folder: Path,
    *,
    note: Callable[[str], None],
    on_progress: Callable[[int], None] = lambda num_bytes: None,
) -> Iterator[tuple[BinaryIO, FileDigest | None]]:
    """Open an input as lines.

    Args:
        path: The input.
        columns: The columns to read of a table.
        folder: The folder for the lines of an input that is not plain lines.
        note: Shows a message.
        on_progress: Called with the number of bytes of lines so far.

    Yields:
        The open lines, and the digest of the input's own bytes. The digest is None if the input
        needs no conversion.

    Raises:
        InputError: The input cannot be converted, or the disk has no room for its lines.
    """
    if is_plain(path):
        with path.open("rb") as file:
            yield file, None
        return
    before = FileFacts.of(path)
    with open_nameless(folder) as file:
        _write_lines(path, columns, file, note, on_progress)
        digest = digest_file(path)
        if FileFacts.of(path) != before:
            raise InputError(f"{path}: changed while it was read. Run the same command again.")
        lines = cast(BinaryIO, io.BufferedReader(cast(io.FileIO, file)))
        lines.seek(0)
        if table_of(path) == "lines":
            _check_lines(path, lines)
            lines.seek(0)
        yield lines, digest


def encoded(path: Path, lines: Iterable[bytes]) -> Iterator[bytes]:
    """The content of an output file with these lines, in the format of its name."""
    if table_of(path) == "parquet":
        return to_parquet(path, lines)
    return compress(path, lines)


def output_lines(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """The lines of an output that noria wrote, with their line endings.

    Args:
        path: The output's path, for its format.
        file: The output, open at its beginning.

    Raises:
        InputError: The file is damaged.
    """
    if table_of(path) == "parquet":
        return from_parquet(path, file)
    return iter(decompressed(path, file))


def _check_packages(path: Path) -> None:
    if table_of(path) != "parquet":
        check_compression(path)
    elif compression_of(path):
        raise UnusableFile(
            f"{path}: expected .parquet, which compresses its own columns, got {path.suffix} after "
            "it. Leave the second suffix out."
        )
    else:
        check_parquet(path)


def _check_lines(path: Path, file: BinaryIO) -> None:
    if (name_and_remedy := other_format(path, file)) is not None:
        name, remedy = name_and_remedy
        raise InputError(f"{path}: expected plain JSON Lines, got {name}. {remedy}")


def _lines_of(path: Path, columns: Columns, note: Callable[[str], None]) -> Iterator[bytes]:
    """The lines of an input in any format, in pieces that need not end with a line."""
    if table_of(path) == "parquet":
        yield from parquet_lines(path, columns, note)
        return
    with path.open("rb") as file:
        content = decompressed(path, file)
        if table_of(path) == "csv":
            yield from csv_lines(path, content, columns, note)
        else:
            yield from iter(lambda: content.read(_PIECE_BYTES), b"")


def _write_lines(
    path: Path,
    columns: Columns,
    file: BinaryIO,
    note: Callable[[str], None],
    on_progress: Callable[[int], None],
) -> None:
    """Write the lines of an input to an unbuffered file."""
    disk, descriptor = Disk(), file.fileno()
    pending, num_bytes = bytearray(), 0

    def flush() -> None:
        nonlocal num_bytes
        disk.write(descriptor, bytes(pending))
        num_bytes += len(pending)
        pending.clear()
        on_progress(num_bytes)

    try:
        # a Parquet table may be large through columns that are not read
        if table_of(path) != "parquet":
            _check_room(path, descriptor)
        for piece in _lines_of(path, columns, note):
            pending += piece
            if len(pending) >= _PIECE_BYTES:
                flush()
        flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(
            f"{path}: expected room for its lines on the disk of the output, got none after "
            f"{num_bytes} bytes. Free disk space, or choose an output on another disk."
        ) from None


def _check_room(path: Path, descriptor: int) -> None:
    """Refuse a disk that cannot even hold the input as it is; its lines are rarely smaller."""
    disk = os.fstatvfs(descriptor)
    if disk.f_bavail * disk.f_frsize < path.stat().st_size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
