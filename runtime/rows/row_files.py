"""Decides by its name how a file holds rows, and converts it to lines and back.

Names end in `.jsonl` or anything else for lines, in `.csv` or `.tsv` and `.parquet` for tables, and
lines and CSV may be compressed: `.jsonl.gz`, `.csv.zst`. An input that is not plain lines is
converted once into a file without a name, on the disk of the output, because rows are read a second
time by their offset there. Cells that are carried to the output are in a second such file.

Does not know about requests. Guarantees: memory does not grow with the number of rows; an output is
a function of its lines; a file that cannot be converted whole is an error before any row runs.
"""

import errno
import io
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
from .answer_tables import AddedColumns, from_parquet, to_parquet
from .columns import Columns
from .input_format import other_format
from .tables import CarriedCells, TableRow, csv_rows, parquet_package, parquet_rows

_PIECE_BYTES = 2**20


@dataclass(frozen=True)
class OpenRows:
    """An input, open as the lines of a batch file."""

    file: BinaryIO
    digest: FileDigest | None = None
    """The digest of the input's own bytes; None if the input needs no conversion."""
    carried: CarriedCells = field(default_factory=CarriedCells)
    """The cells to carry to the output."""


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
            f"{path}: expected a table (.csv, .tsv or .parquet) with --prompt-column, --id-column, "
            "--url or --carry, got JSON Lines, which have keys. Leave the options out."
        )
    if is_plain(path):
        with path.open("rb") as file:
            _check_lines(path, file)
    else:
        _check_packages(path)


def check_output(path: Path, added: AddedColumns) -> None:
    """Check that an output's format can be written.

    Args:
        path: The output.
        added: The columns that the job adds to a table.

    Raises:
        UnusableFile: It cannot, the package for it is missing, or two columns have one name.
    """
    if table_of(path) == "csv":
        raise UnusableFile(
            f"{path}: expected .jsonl, .jsonl.gz, .jsonl.zst or .parquet for an output, got "
            f"{without_compression(path).suffix}, which cannot hold answers with several parts. "
            "Choose another suffix."
        )
    _check_packages(path)
    if table_of(path) == "parquet":
        added.check(path)


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
) -> Iterator[OpenRows]:
    """Open an input as lines.

    Args:
        path: The input.
        columns: The columns to read of a table.
        folder: The folder for the lines of an input that is not plain lines.
        note: Shows a message.
        on_progress: Called with the number of bytes of lines so far.

    Raises:
        InputError: The input cannot be converted, or the disk has no room for its lines.
    """
    if is_plain(path):
        with path.open("rb") as file:
            yield OpenRows(file)
        return
    before = FileFacts.of(path)
    with open_nameless(folder) as file, open_nameless(folder) as cells:
        _write_lines(path, columns, _Pieces(file, on_progress), _Pieces(cells), note)
        digest = digest_file(path)
        if FileFacts.of(path) != before:
            raise InputError(f"{path}: changed while it was read. Run the same command again.")
        lines = _buffered(file)
        if table_of(path) == "lines":
            _check_lines(path, lines)
            lines.seek(0)
        yield OpenRows(lines, digest, CarriedCells(_buffered(cells) if columns.carried else None))


def encoded(
    path: Path, lines_of: Callable[[], Iterable[bytes]], added: AddedColumns
) -> Iterator[bytes]:
    """The content of an output file, in the format of its name.

    Args:
        path: The output.
        lines_of: Reads the lines of the output, from the first on.
        added: The columns that the job adds to a table.
    """
    if table_of(path) == "parquet":
        return to_parquet(path, lines_of, added)
    return compress(path, lines_of())


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
        parquet_package(path)


def _check_lines(path: Path, file: BinaryIO) -> None:
    if (name_and_remedy := other_format(path, file)) is not None:
        name, remedy = name_and_remedy
        raise InputError(f"{path}: expected plain JSON Lines, got {name}. {remedy}")


class _Pieces:
    """Writes lines to an unbuffered file in large pieces."""

    def __init__(self, file: BinaryIO, on_progress: Callable[[int], None] = lambda num_bytes: None):
        self.descriptor = file.fileno()
        self.num_bytes = 0
        self._disk = Disk()
        self._pending = bytearray()
        self._on_progress = on_progress

    def add(self, lines: bytes) -> None:
        self._pending += lines
        if len(self._pending) >= _PIECE_BYTES:
            self.flush()

    def flush(self) -> None:
        self._disk.write(self.descriptor, bytes(self._pending))
        self.num_bytes += len(self._pending)
        self._pending.clear()
        self._on_progress(self.num_bytes)


def _rows_of(path: Path, columns: Columns, note: Callable[[str], None]) -> Iterator[TableRow]:
    """The lines of an input in any format, in pieces that need not end with a line, and cells."""
    if table_of(path) == "parquet":
        yield from parquet_rows(path, columns, note)
        return
    with path.open("rb") as file:
        content = decompressed(path, file)
        if table_of(path) == "csv":
            yield from csv_rows(path, content, columns, note)
        else:
            yield from ((piece, b"") for piece in iter(lambda: content.read(_PIECE_BYTES), b""))


def _write_lines(
    path: Path, columns: Columns, lines: _Pieces, cells: _Pieces, note: Callable[[str], None]
) -> None:
    """Write the lines of an input, and the cells that it carries."""
    try:
        # a Parquet table may be large through columns that are not read
        if table_of(path) != "parquet":
            _check_room(path, lines.descriptor)
        for line, carried in _rows_of(path, columns, note):
            lines.add(line)
            cells.add(carried)
        lines.flush()
        cells.flush()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise InputError(
            f"{path}: expected room for its lines on the disk of the output, got none after "
            f"{lines.num_bytes} bytes. Free disk space, or choose an output on another disk."
        ) from None


def _buffered(file: BinaryIO) -> BinaryIO:
    """An unbuffered file, buffered and open at its beginning."""
    lines = cast(BinaryIO, io.BufferedReader(cast(io.FileIO, file)))
    lines.seek(0)
    return lines


def _check_room(path: Path, descriptor: int) -> None:
    """Refuse a disk that cannot even hold the input as it is; its lines are rarely smaller."""
    disk = os.fstatvfs(descriptor)
    if disk.f_bavail * disk.f_frsize < path.stat().st_size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
