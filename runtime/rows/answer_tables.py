"""Writes output lines as a Parquet table, with columns for the parts of answers.

Does not know how answers are made. Guarantees: a table is a function of its lines and of the names
of the columns that its job adds; memory does not grow with the number of rows.
"""

import base64
import io
import json
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InputError, UnusableFile
from ..files.optional_packages import require
from .structured_body import FORM_KEYS, field_names
from .tables import BATCH_ROWS, CARRIED, arrow_errors, parquet_package

_INT64 = range(-(2**63), 2**63)
_SCALARS = ("bool_", "int64", "float64", "string")


class ColumnType:
    """The type of the values that a column has; `add` all of them before using it.

    Whole numbers are `int64`, numbers `double`, truth values `bool`, and lists have the type of
    their items. A column of objects or of several kinds of values has texts: JSON for all values
    that are no texts themselves. A column without values has texts, too. So every value has a form
    in the type of its column.
    """

    def __init__(self):
        self._kinds: set[str] = set()
        self._items: ColumnType | None = None

    def add(self, value: Any) -> None:
        """Note a value of the column."""
        if value is None:
            return
        if isinstance(value, list):
            self._items = self._items or ColumnType()
            for item in value:
                self._items.add(item)
        self._kinds.add(_kind(value))

    def in_arrow(self, arrow: Any) -> Any:
        """The type in the package `arrow`."""
        if self._kinds == {"list"} and self._items is not None:
            return arrow.list_(self._items.in_arrow(arrow))
        return getattr(arrow, self._scalar())()

    def form(self, value: Any) -> Any:
        """The form of a value of the column in its type."""
        if value is None:
            return None
        if self._kinds == {"list"} and self._items is not None:
            return list(map(self._items.form, value))
        if self._scalar() == "float64":
            return float(value)
        if self._scalar() != "string":
            return value
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        # JSON may escape half of a pair of surrogates, which no encoding has
        return text.encode("utf-8", "replace").decode()

    def _scalar(self) -> str:
        if self._kinds == {"int64", "float64"}:
            return "float64"
        kind = next(iter(self._kinds)) if len(self._kinds) == 1 else "string"
        return kind if kind in _SCALARS else "string"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool_"
    if isinstance(value, int):
        return "int64" if value in _INT64 else "object"
    if isinstance(value, float):
        return "float64"
    return {str: "string", list: "list"}.get(type(value), "object")


_PARTS = {
    "custom_id": "string",
    "text": "string",
    "finish_reason": "string",
    "token_logprobs": "list",
    "embedding": "list",
    "scores": "list",
    "prompt_tokens": "int64",
    "completion_tokens": "int64",
    "error_code": "string",
    "error_message": "string",
    "line": "string",
}
"""The columns of every table, and their types; lists are lists of `float32`."""


@dataclass(frozen=True)
class AddedColumns:
    """The names of the columns that a job adds to those of every table."""

    carried: tuple[str, ...] = ()
    """Columns of the input."""
    fields: tuple[str, ...] = ()
    """Keys of answers, which are JSON objects."""

    @classmethod
    def of(cls, configuration: Mapping[str, str]) -> "AddedColumns":
        """The columns of a job with a configuration, as its manifest has it."""
        form = json.loads(configuration.get("form", "{}"))
        if "pipeline" in configuration:
            form = json.loads(configuration["pipeline"])["stages"][-1]
        fields = field_names({key: form[key] for key in FORM_KEYS if key in form})
        return cls(tuple(json.loads(configuration.get("carried", "{}"))), fields)

    def check(self, path: Path) -> None:
        """Refuse names that two columns of the output would have; UnusableFile."""
        names = Counter([*_PARTS, *self.carried, *self.fields])
        if not (twice := [name for name, count in names.items() if count > 1]):
            return
        remedy = "Carry it under another name: --carry COLUMN=NAME."
        if twice[0] not in self.carried:
            remedy = "Rename the key in the form, or choose .jsonl, whose lines have no columns."
        raise UnusableFile(
            f"{path}: expected columns with names of their own, got several for {twice[0]!r}: "
            f"those of every output ({', '.join(_PARTS)}), carried ones "
            f"({', '.join(self.carried) or 'none'}) and fields of answers "
            f"({', '.join(self.fields) or 'none'}). {remedy}"
        )


def to_parquet(
    path: Path, lines_of: Callable[[], Iterable[bytes]], added: AddedColumns
) -> Iterator[bytes]:
    """The content of a Parquet table with one row for each output line.

    The column `line` has the whole line, and the other columns its parts.

    Args:
        path: The table, for errors.
        lines_of: Reads the lines, from the first on; twice if types depend on values.
        added: The columns beside those of every table.
    """
    parquet, arrow = parquet_package(path), require("pyarrow", "parquet", UnusableFile)
    types = _types_of(lines_of(), added) if added != AddedColumns() else {}
    schema = _schema(arrow, types, added)
    sink, remaining = _Sink(), iter(lines_of())
    with parquet.ParquetWriter(sink, schema, compression="zstd") as writer:
        while group := list(islice(remaining, BATCH_ROWS)):
            rows = [_output_row(line, added, types) for line in group]
            writer.write_batch(arrow.RecordBatch.from_pylist(rows, schema))
            yield from sink.drain()
    yield from sink.drain()


def from_parquet(path: Path, file: BinaryIO) -> Iterator[bytes]:
    """The output lines in a table that `to_parquet` wrote."""
    try:
        table = parquet_package(path).ParquetFile(file)
        for batch in table.iter_batches(BATCH_ROWS, columns=["line"]):
            for line in batch.column(0).to_pylist():
                yield line.encode() + b"\n"
    except (*arrow_errors(), IndexError, AttributeError) as error:
        raise InputError(
            f"{path}: expected a Parquet table that noria wrote, got {error}. Copy it again."
        ) from None


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


def _types_of(lines: Iterable[bytes], added: AddedColumns) -> dict[str, ColumnType]:
    """The types of the added columns, from their values in all lines."""
    types = {name: ColumnType() for name in (*added.carried, *added.fields)}
    for line in lines:
        for name, value in _added_values(json.loads(line), added).items():
            types[name].add(value)
    return types


def _schema(arrow: Any, types: Mapping[str, ColumnType], added: AddedColumns) -> Any:
    of_parts = {
        name: arrow.list_(arrow.float32()) if kind == "list" else getattr(arrow, kind)()
        for name, kind in _PARTS.items()
    }
    of_added = {name: column.in_arrow(arrow) for name, column in types.items()}
    custom_id, text, *others = of_parts
    names = [custom_id, *added.carried, text, *added.fields, *others]
    return arrow.schema([(name, {**of_parts, **of_added}[name]) for name in names])


def _output_row(
    line: bytes, added: AddedColumns, types: Mapping[str, ColumnType]
) -> dict[str, Any]:
    record = json.loads(line)
    body, choice = _body(record), _choice(record)
    error, usage = record["error"] or body.get("error") or {}, body.get("usage", {})
    values = _added_values(record, added)
    return {
        "custom_id": record["custom_id"],
        "text": _text(choice),
        "finish_reason": choice.get("finish_reason"),
        "token_logprobs": _token_logprobs(choice.get("logprobs")),
        "embedding": _embedding(body),
        "scores": _scores(body),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "error_code": error.get("code"),
        "error_message": error.get("message"),
        "line": line.decode().rstrip("\n"),
        **{name: types[name].form(value) for name, value in values.items()},
    }


def _added_values(record: Mapping[str, Any], added: AddedColumns) -> dict[str, Any]:
    """The values of the added columns in the record of a line; fields of the first choice."""
    cells, answer = record.get(CARRIED, {}), {}
    if added.fields and (text := _text(_choice(record))):
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            answer = {}
    fields = answer if isinstance(answer, dict) else {}
    return {name: cells.get(name) for name in added.carried} | {
        name: fields.get(name) for name in added.fields
    }


def _body(record: Mapping[str, Any]) -> Mapping[str, Any]:
    return (record["response"] or {}).get("body") or {}


def _choice(record: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(iter(_body(record).get("choices", ())), {})


def _text(choice: Mapping[str, Any]) -> str | None:
    return choice.get("text", choice.get("message", {}).get("content"))


def _token_logprobs(logprobs: Mapping[str, Any] | None) -> list[float | None] | None:
    """The log-probabilities of the tokens of a completion or a chat."""
    if logprobs is None:
        return None
    if "token_logprobs" in logprobs:
        return logprobs["token_logprobs"]
    return [token["logprob"] for token in logprobs["content"]]


def _embedding(body: Mapping[str, Any]) -> Any:
    """The vector of the first text of a row."""
    item = next(iter(body.get("data", ())), {})
    vector = item.get("embedding")
    if isinstance(vector, str):
        content = base64.b64decode(vector)
        return struct.unpack(f"<{len(content) // 4}f", content)
    return vector


def _scores(body: Mapping[str, Any]) -> list[float] | None:
    """The scores of pairs, of ranked documents, or of the classes of the first text."""
    if "results" in body:
        return [result["relevance_score"] for result in body["results"]]
    items = body.get("data", ())
    if items and "probs" in items[0]:
        return items[0]["probs"]
    return [item["score"] for item in items if "score" in item] or None
