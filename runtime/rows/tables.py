"""Reads rows from CSV and Parquet tables, and writes output lines as a Parquet table.

Each row of a table becomes one simple line, `{"id": ..., "prompt": ...}`. Does not know what makes
a request valid. Guarantees: a table with n rows gives n lines; memory does not grow with the
number of rows.
"""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InputError, RowError, UnusableFile
from ..files.compression import without_compression
from ..files.optional_packages import require
from ..files.strict_json import MAX_LINE_BYTES, dump_line, parse_object

BATCH_ROWS = 1024
"""Rows of a Parquet table that are in memory at once."""
_IDS = ("custom_id", "id")
_PROMPTS = ("prompt", "messages")


@dataclass(frozen=True)
class Columns:
    """The names of the columns to read; None for the usual names, if the table has them."""

    prompt: str | None = None
    id: str | None = None

    def find(self, path: Path, present: Sequence[str]) -> tuple[str, str | None]:
        """The column of prompts and the column of ids; the latter is None if rows are numbered.

        Raises:
            InputError: A column is missing, or several have its name.
        """
        prompt = self._named(path, "--prompt-column", self.prompt, _PROMPTS, present)
        if prompt is None:
            raise InputError(
                f"{path}: expected a column {_PROMPTS[0]!r}, got {', '.join(present) or 'none'}. "
                "Name the column of the prompts with --prompt-column, and separate cells "
                "by commas in CSV and by tabs in TSV."
            )
        return prompt, self._named(path, "--id-column", self.id, _IDS, present)

    def _named(
        self,
        path: Path,
        option: str,
        given: str | None,
        usual: Sequence[str],
        present: Sequence[str],
    ) -> str | None:
        name = given or next((name for name in usual if name in present), None)
        if name is not None and (count := present.count(name)) != 1:
            raise InputError(
                f"{path}: expected one column {name!r}, got {count} of it among "
                f"{', '.join(present)}. Name another one with {option}."
            )
        return name


def csv_lines(
    path: Path, file: BinaryIO, columns: Columns, note: Callable[[str], None]
) -> Iterator[bytes]:
    """The rows of a CSV table as lines of JSON; `.tsv` tables are separated by tabs.

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
        prompt, name = columns.find(path, header)
        _note_unread(path, header, (prompt, name), note)
        for number, cells in enumerate(filter(None, reader), start=1):  # without blank lines
            if len(cells) != len(header):
                raise InputError(
                    f"{path}: row {number} (line {reader.line_num}): expected {len(header)} cells, "
                    f"as in the first line, got {len(cells)}. Quote cells that contain separators."
                )
            row = dict(zip(header, cells, strict=True))
            yield _line(prompt, row[prompt], None if name is None else row[name])
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


def parquet_lines(path: Path, columns: Columns, note: Callable[[str], None]) -> Iterator[bytes]:
    """The rows of a Parquet table as lines of JSON.

    Raises:
        InputError: It is no Parquet file, a column is missing, or it has values without JSON form.
    """
    parquet, number = _parquet(path), 0
    try:
        with parquet.ParquetFile(path) as table:
            present = table.schema_arrow.names
            prompt, name = columns.find(path, present)
            _note_unread(path, present, (prompt, name), note)
            read = [prompt] if name in (None, prompt) else [prompt, name]
            for batch in table.iter_batches(BATCH_ROWS, columns=read):
                prompts, ids = batch.column(prompt), None if name is None else batch.column(name)
                for index in range(batch.num_rows):
                    number += 1
                    custom_id = None if ids is None else _without_nan(ids[index].as_py())
                    yield _line(prompt, _without_nan(prompts[index].as_py()), custom_id)
    except InputError:
        raise
    except (*_arrow_errors(), OSError) as error:
        problem = str(error).rstrip(".")
        raise InputError(
            f"{path}: expected Parquet, got {problem}. Write the table again."
        ) from None
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{path}: row {number}: expected texts, token ids or messages as prompts, and texts or "
            f"integers as ids, got other values ({error}). Name other columns with "
            "--prompt-column and --id-column."
        ) from None


def to_parquet(path: Path, lines: Iterable[bytes]) -> Iterator[bytes]:
    """The content of a Parquet table with one row for each output line.

    The column `line` has the whole line, and the other columns its parts.
    """
    parquet, arrow = _parquet(path), require("pyarrow", "parquet", UnusableFile)
    schema = arrow.schema(
        [
            ("custom_id", arrow.string()),
            ("text", arrow.string()),
            ("finish_reason", arrow.string()),
            ("prompt_tokens", arrow.int64()),
            ("completion_tokens", arrow.int64()),
            ("error_code", arrow.string()),
            ("error_message", arrow.string()),
            ("line", arrow.string()),
        ]
    )
    sink, remaining = _Sink(), iter(lines)
    with parquet.ParquetWriter(sink, schema, compression="zstd") as writer:
        while group := list(islice(remaining, BATCH_ROWS)):
            batch = arrow.RecordBatch.from_pylist(list(map(_output_row, group)), schema)
            writer.write_batch(batch)
            yield from sink.drain()
    yield from sink.drain()


def from_parquet(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """The output lines in a table that `to_parquet` wrote."""
    try:
        table = _parquet(path).ParquetFile(file)
        for batch in table.iter_batches(BATCH_ROWS, columns=["line"]):
            for line in batch.column(0).to_pylist():
                yield line.encode() + b"\n"
    except (*_arrow_errors(), IndexError, AttributeError) as error:
        raise InputError(
            f"{path}: expected a Parquet table that noria wrote, got {error}. Copy it again."
        ) from None


def check_parquet(path: Path) -> None:
    """Check that the package for Parquet is installed; UnusableFile if it is not."""
    _parquet(path)


class _Sink(io.RawIOBase):
    """A stream to write to; `drain` returns the bytes written since the last call of it."""

    def __init__(self):
        self._pieces: list[bytes] = []
        self._size = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._size

    def write(self, content: Any) -> int:
        self._pieces.append(bytes(content))
        self._size += len(self._pieces[-1])
        return len(self._pieces[-1])

    def drain(self) -> list[bytes]:
        pieces, self._pieces = self._pieces, []
        return pieces


def _without_nan(value: object) -> object:
    """The value that a float stands for: NaN is a missing value, a whole number is an integer.

    Other tools write both as floats if the column is one of floats.
    """
    if not isinstance(value, float):
        return value
    return None if math.isnan(value) else int(value) if value.is_integer() else value


def _line(column: str, prompt: object, custom_id: object) -> bytes:
    is_chat = column == "messages" or (
        isinstance(prompt, list) and any(isinstance(item, dict) for item in prompt)
    )
    if isinstance(prompt, list) and is_chat:
        # in a column of structs, keys that a message lacks are null
        prompt = [
            {key: value for key, value in message.items() if value is not None}
            if isinstance(message, dict)
            else message
            for message in prompt
        ]
    elif isinstance(prompt, str) and is_chat:
        prompt = _parsed(prompt)
    record = {} if custom_id is None else {"id": custom_id}
    return dump_line({**record, "messages" if is_chat else "prompt": prompt}) + b"\n"


def _parsed(messages: str) -> object:
    """The messages in a text; a text that is no JSON is returned, and its row becomes an error."""
    with suppress(RowError):
        record = parse_object(f'{{"messages":{messages}}}'.encode())
        if len(record) == 1:
            return record["messages"]
    return messages


def _note_unread(
    path: Path, present: Sequence[str], read: Sequence[str | None], note: Callable[[str], None]
) -> None:
    unread = [name for name in present if name not in read]
    if unread:
        note(f"{path.name}: columns that are not read: {', '.join(unread)}")


def _output_row(line: bytes) -> dict[str, Any]:
    record = json.loads(line)
    response, error = record["response"] or {}, record["error"]
    body = response.get("body") or {}
    choice = next(iter(body.get("choices", ())), {})
    error, usage = error or body.get("error") or {}, body.get("usage", {})
    return {
        "custom_id": record["custom_id"],
        "text": choice.get("text", choice.get("message", {}).get("content")),
        "finish_reason": choice.get("finish_reason"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "error_code": error.get("code"),
        "error_message": error.get("message"),
        "line": line.decode().rstrip("\n"),
    }


def _parquet(path: Path) -> Any:
    try:
        return require("pyarrow.parquet", "parquet", UnusableFile)
    except UnusableFile as error:
        raise UnusableFile(f"{path}: {error}") from None


def _arrow_errors() -> tuple[type[Exception], ...]:
    arrow = require("pyarrow", "parquet", UnusableFile)
    return arrow.ArrowInvalid, arrow.ArrowNotImplementedError
