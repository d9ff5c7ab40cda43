"""Reads the rows of an input with stages, and follows each of them through the finished stages.

A row of the input is any JSON object, or an OpenAI Batch line, whose body is then the row. It goes
through the stages until it ends with an error: of its line, of a template, or of a request. The
output of a stage has a line for each row that the stage asked, in the order of the input, so rows
and lines are matched by their order alone.

Does not know about models or templates. Guarantees: every row of the part is followed once, in the
order of the input; memory does not grow with the number of answers.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import RowError
from ..files.strict_json import Line, Unit, read_lines
from ..rows.lines import (
    BadRow,
    PlacedRow,
    custom_id_of,
    record_of,
    with_unique_ids,
    written_id,
)
from ..rows.part import Part
from ..rows.results import error_of_line
from ..rows.row_files import OpenRows, unit_of
from .stage_renderer import answers_table, calls_text

_ENVELOPE = frozenset({"custom_id", "method", "url", "body"})


@dataclass(frozen=True)
class InputRow(PlacedRow):
    """A row of the input that can enter the first stage; its hash is that of its line."""

    custom_id: str
    data: Mapping[str, Any]


@dataclass(frozen=True)
class StageFiles:
    """The files of one stage, in the folder of a job with stages."""

    folder: Path
    number: int
    """The number of the stage, from 1."""
    name: str

    @property
    def input(self) -> Path:
        """The requests of the stage."""
        return self.folder / f"{self.number}-{self.name}.in.jsonl"

    @property
    def output(self) -> Path:
        """The answers of the stage; its manifest, journal and lock are beside it."""
        return self.folder / f"{self.number}-{self.name}.jsonl"

    @property
    def errors(self) -> Path:
        """The error lines of rows that end before the stage asks them, with their numbers."""
        return self.folder / f"{self.number}-{self.name}.errors.jsonl"


@dataclass(frozen=True)
class FollowedRow:
    """A row after some stages: the answers that it has, or the line with which it ended."""

    row: InputRow | BadRow
    answers: Mapping[str, Any]
    """The variables of templates for the stages that answered it."""
    stage: str | None
    """The stage in which it ended; None if all of the stages answered it."""
    was_asked: bool
    """Whether the last stage that it reached asked its request."""
    line: bytes
    """The last output line, without a line end; empty before the first stage."""


@dataclass(frozen=True)
class StagedRows:
    """The rows of an input, and the stages that those of the job's part go through."""

    source: OpenRows
    path: Path
    """The input."""
    part: Part
    stages: Sequence[StageFiles]

    def all(self) -> Iterator[InputRow | BadRow]:
        """Read all rows of the input, from its beginning; one reader at a time."""
        return read_rows(self.source.file, unit_of(self.path))

    def follow(self, num_stages: int) -> Iterator[FollowedRow]:
        """Follow every row of the job's part through the first stages, which have finished."""
        with ExitStack() as files:
            finished = [_FinishedStage(stage, files) for stage in self.stages[:num_stages]]
            for row in self.all():
                if self.part.has(row.row):
                    yield _follow(row, finished)


def read_rows(file: BinaryIO, unit: Unit = "line") -> Iterator[InputRow | BadRow]:
    """Read all rows of an input; later rows with the custom_id of an earlier row are errors.

    Args:
        file: The input; it is read from its beginning.
        unit: The unit in which errors count places.
    """
    file.seek(0)
    lines = enumerate(read_lines(file, unit=unit))
    yield from with_unique_ids(_read_row(line, index) for index, line in lines)


def _read_row(line: Line, index: int) -> InputRow | BadRow:
    content, custom_id = line.content or b"", None
    line_hash = hashlib.sha256(content).hexdigest()
    try:
        record = record_of(line)
        is_request = set(record) >= _ENVELOPE
        custom_id = custom_id_of(record, index, is_simple=not is_request)
        data = record["body"] if is_request else record
        if not isinstance(data, dict):
            raise RowError("invalid_line", "body: expected an object, got another value.", "body")
    except RowError as error:
        message = f"{line.place}: {error.message}"
        custom_id = custom_id or written_id(content)
        failure = RowError(error.code, message, error.param)
        return BadRow(
            index, line.number, line.offset, custom_id, line_hash, failure, unit=line.unit
        )
    return InputRow(index, line.number, line.offset, custom_id, line_hash, data, unit=line.unit)


def _follow(row: InputRow | BadRow, stages: Sequence["_FinishedStage"]) -> FollowedRow:
    answers: dict[str, Any] = {}
    line = b""
    for stage in stages:
        if (ended := stage.error_before(row.row)) is not None:
            return FollowedRow(row, answers, stage.name, False, ended)
        line = stage.lines.readline().removesuffix(b"\n")
        if error_of_line(line) is not None:
            return FollowedRow(row, answers, stage.name, True, line)
        answers[stage.name] = answers_table(_texts(line))
    return FollowedRow(row, answers, None, True, line)


class _FinishedStage:
    """The lines of a finished stage, read once in order."""

    def __init__(self, files: StageFiles, opened: ExitStack):
        self.name = files.name
        self.lines = opened.enter_context(files.output.open("rb"))
        """The output lines of the rows that the stage asked."""
        self._errors = opened.enter_context(files.errors.open("rb"))
        self._next_error = self._read_error()

    def error_before(self, row: int) -> bytes | None:
        """The line of a row that ended before the stage asked it; None for other rows."""
        if self._next_error is None or self._next_error[0] != row:
            return None
        _, line = self._next_error
        self._next_error = self._read_error()
        return line

    def _read_error(self) -> tuple[int, bytes] | None:
        number, tab, line = self._errors.readline().removesuffix(b"\n").partition(b"\t")
        return (int(number), line) if tab else None


def error_record(row: int, line: bytes) -> bytes:
    """A line of `StageFiles.errors`."""
    return b"%d\t%s\n" % (row, line)


def _texts(line: bytes) -> list[str]:
    """The texts of all answers in an output line."""
    choices = json.loads(line)["response"]["body"]["choices"]
    return [
        _text_of(choice["message"]) if "message" in choice else choice["text"] for choice in choices
    ]


def _text_of(message: Mapping[str, Any]) -> str:
    """The content of a message, and its calls as a list in JSON."""
    parts = [message["content"]] if message["content"] else []
    if calls := message.get("tool_calls"):
        functions = (call["function"] for call in calls)
        parts.append(calls_text((call["name"], call["arguments"]) for call in functions))
    return "\n".join(parts)
