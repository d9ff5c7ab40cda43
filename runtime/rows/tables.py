"""Reads rows from CSV and Parquet tables as lines of a batch file.

Carried cells are no part of requests: they are kept in a file of their own, one line for each row,
change no answer, and stand under the key `carried` of output lines. Does not know what makes a
request valid. Guarantees: a table with n rows gives n lines; memory does not grow with the number
of rows; an output line has the carried cells of its own row, whichever run or part answered it.
"""

import csv
import datetime
import decimal
import io
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InputError, UnusableFile
from ..files.compression import without_compression
from ..files.optional_packages import require
from ..files.strict_json import MAX_LINE_BYTES, dump_line
from .columns import Columns, RequestColumns
from .part import Part

CARRIED = "carried"
"""The key of the carried cells in output lines."""

BATCH_ROWS = 1024
"""Rows of a Parquet table that are in memory at once."""
TableRow = tuple[bytes, bytes]
"""The request of a row, and its carried cells, as lines of JSON."""
_TIMES = (datetime.date, datetime.time)
_TEXTS = ("string", "large_string")
_LISTS = ("list", "large_list", "fixed_size_list")
_SCALARS = ("null", "boolean", "integer", "floating", "decimal", "date", "time", "timestamp")
"""Types of Parquet columns, as pyarrow names them."""


def csv_rows(
    path: Path, file: BinaryIO, columns: Columns, note: Callable[[str], None]
) -> Iterator[TableRow]:
    """The rows of a CSV table; `.tsv` tables are separated by tabs.

    Raises:
        InputError: A column is missing, a row has more or fewer cells than the header, or the text
          is no UTF-8 or no CSV.
    """
    limit = csv.field_size_limit(MAX_LINE_BYTES)
    is_tabs = without_compression(path).suffix.lower() == ".tsv"
    text = io.TextIOWrapper(file, "utf-8-sig", newline="")
    reader = csv.reader(text, delimiter="\t" if is_tabs else ",", strict=True)
    number = 0
    try:
        header = next(reader, [])
        found = columns.find(path, header)
        _note_columns(path, header, found, note)
        for number, cells in enumerate(filter(None, reader), start=1):  # without blank lines
            if len(cells) != len(header):
                raise InputError(
                    f"{path}: row {number} (line {reader.line_num}): expected {len(header)} cells, "
                    f"as in the first line, got {len(cells)}. Quote cells that contain separators."
                )
            row = dict(zip(header, cells, strict=True))
            yield found.line(number - 1, row), _carried(found, row)
    except UnicodeDecodeError as error:
        raise InputError(
            f"{path}: expected UTF-8, got {error.reason} after row {number} (line "
            f"{reader.line_num}). Run iconv -t UTF-8 on it first."
        ) from None
    except csv.Error as error:
        raise InputError(
            f"{path}: row {number + 1} (line {reader.line_num}): expected CSV, got {error}. Write "
            "the table again."
        ) from None
    finally:
        text.detach()  # else the file would be closed when `text` is deleted
        csv.field_size_limit(limit)


def parquet_rows(path: Path, columns: Columns, note: Callable[[str], None]) -> Iterator[TableRow]:
    """The rows of a Parquet table.

    Raises:
        InputError: It is no Parquet file, a column is missing or has another type than texts, or
          it has values without JSON form.
    """
    parquet, number = parquet_package(path), 0
    try:
        with parquet.ParquetFile(path) as table:
            present = table.schema_arrow.names
            found = _of_types(path, columns.find(path, present), table.schema_arrow)
            _note_columns(path, present, found, note)
            form = _json_value if columns.are_variables else lambda value: value
            for batch in table.iter_batches(BATCH_ROWS, columns=found.names):
                values = {name: batch.column(name) for name in found.names}
                for index in range(batch.num_rows):
                    number += 1
                    row = {name: column[index].as_py() for name, column in values.items()}
                    request = {name: _cell(form(value)) for name, value in row.items()}
                    yield found.line(number - 1, request), _carried(found, row)
    except InputError:
        raise
    except (*arrow_errors(), OSError) as error:
        problem = str(error).rstrip(".")
        raise InputError(
            f"{path}: expected Parquet, got {problem}. Write the table again."
        ) from None
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{path}: row {number}: expected texts, token ids or messages as prompts, texts or "
            f"integers as ids, and finite numbers, got other values ({error}). Name other columns "
            "with --prompt-column and --id-column."
        ) from None


def parquet_package(path: Path) -> Any:
    """The package for Parquet; UnusableFile names the file if it is not installed."""
    try:
        return require("pyarrow.parquet", "parquet", UnusableFile)
    except UnusableFile as error:
        raise UnusableFile(f"{path}: {error}") from None


def arrow_errors() -> tuple[type[Exception], ...]:
    """The errors of the package for Parquet about the content of a file."""
    arrow = require("pyarrow", "parquet", UnusableFile)
    return arrow.ArrowInvalid, arrow.ArrowNotImplementedError


def _of_types(path: Path, found: RequestColumns, schema: Any) -> RequestColumns:
    """The columns with types that have a JSON form; refuses those that an option names."""
    types = dict(zip(schema.names, schema.types, strict=True))
    for name, column in found.carried.items():
        if not _has_json_form(types[column]):
            raise InputError(
                f"{path}: --carry {column}: expected texts, numbers, times, or lists or objects of "
                f"them, got the type {types[column]}. Leave {name} out."
            )
    for key in ("prompt", "messages", "query"):
        column = found.contents.get(key) if found.url else None
        is_list = column is not None and _is_any(types[column], _LISTS)
        if is_list and _is_any(types[column].value_type, _TEXTS):
            raise InputError(
                f"{path}: column {column}: expected one text in each row for {key}, got the type "
                f"{types[column]}. Name another column with --prompt-column."
            )
    if found.url:
        return found
    contents = {key: name for key, name in found.contents.items() if _has_json_form(types[name])}
    return replace(found, contents=contents)


def _has_json_form(arrow_type: Any) -> bool:
    """Whether `_json_value` gives values of a type a form that JSON has."""
    if _is_any(arrow_type, ("dictionary",)):
        return _has_json_form(arrow_type.value_type)
    if _is_any(arrow_type, (*_LISTS, "struct")):
        fields = map(arrow_type.field, range(arrow_type.num_fields))
        return all(_has_json_form(item.type) for item in fields)
    return _is_any(arrow_type, (*_TEXTS, *_SCALARS))


def _is_any(arrow_type: Any, kinds: Sequence[str]) -> bool:
    types = require("pyarrow", "parquet", UnusableFile).types
    return any(getattr(types, f"is_{kind}")(arrow_type) for kind in kinds)


def _carried(found: RequestColumns, row: Mapping[str, Any]) -> bytes:
    if not found.carried:
        return b""
    carried = {name: _json_value(row[column]) for name, column in found.carried.items()}
    return dump_line(carried) + b"\n"


def _json_value(value: Any) -> Any:
    """The JSON form of a value: times and decimals are texts, and NaN is a missing value."""
    if isinstance(value, _TIMES):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, list):
        return list(map(_json_value, value))
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value


def _cell(value: object) -> object:
    """The value that a float stands for: NaN is a missing value, a whole number is an integer.

    Other tools write both as floats if the column is one of floats.
    """
    if not isinstance(value, float):
        return value
    return None if math.isnan(value) else int(value) if value.is_integer() else value


def _note_columns(
    path: Path, present: Sequence[str], found: RequestColumns, note: Callable[[str], None]
) -> None:
    if unread := [name for name in present if name not in found.names]:
        note(f"{path.name}: columns that are not read: {', '.join(unread)}")
    if found.id is None:
        note(f"{path.name}: ids are row numbers; --id-column names a column of ids")


@dataclass(frozen=True)
class CarriedCells:
    """The carried cells of all rows of an input, as lines of JSON in the order of the rows."""

    file: BinaryIO | None = None
    """The lines; None if nothing is carried."""

    def of(self, part: Part) -> Iterator[bytes]:
        """The cells of each row of a part, in order; empty if nothing is carried."""
        if self.file is None:
            return repeat(b"")
        self.file.seek(0)
        return islice(self.file, part.index, None, part.num_parts)


def with_carried(line: bytes, cells: bytes) -> bytes:
    """An output line with the carried cells of its row, if there are any."""
    return line[:-1] + b',"%s":%s}' % (CARRIED.encode(), cells.rstrip()) if cells else line
