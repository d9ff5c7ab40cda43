"""The first pass over a batch file: what each row is and needs, without keeping its prompt.

Knows nothing of the journal, devices or buckets. Guarantees: one `ScannedRow` for each line that is
not blank, in order, with custom_ids unique among the rows that will run; memory per row is small
and does not grow with its prompt.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..request import RowError
from ..strict_json import Line, read_line_at, read_lines
from .lines import BadRow, BatchRow, duplicate_of, read_row

Encode = Callable[[BatchRow], Sequence[int]]


class InputError(ValueError):
    """The input file cannot be used."""


@dataclass(frozen=True, slots=True)
class Need:
    """What a request asks of the buckets."""

    prompt_length: int
    max_tokens: int | None
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    has_stops: bool = False
    """Whether stop strings may end it."""


@dataclass(frozen=True, slots=True)
class ScannedRow:
    """A row's place and need; `bad` instead of the need where the scan found an error."""

    row: int
    line_number: int
    offset: int
    custom_id: str | None
    request_hash: str
    need: Need | None
    bad: BadRow | None

    @property
    def key(self) -> tuple[str, str]:
        """What the journal finds the row by."""
        return self.custom_id or "", self.request_hash


@dataclass(frozen=True)
class ScanSummary:
    """The whole input, as far as building the graphs needs to know it."""

    rows: Sequence[ScannedRow]
    input_sha256: str
    num_bytes: int

    @property
    def needs(self) -> list[Need]:
        """The needs of every row that can run, in input order."""
        return [row.need for row in self.rows if row.need is not None]


def check_input(path: Path) -> None:
    """Refuse what cannot be read twice, line by line."""
    if not path.exists():
        raise InputError(f"{path}: expected an input file, got nothing there.")
    if not path.is_file():
        raise InputError(
            f"{path}: expected a regular file, as the input is read twice, got "
            f"{'a directory' if path.is_dir() else 'a pipe or device'}. Save it to a file first."
        )
    with path.open("rb") as file:
        if file.read(2) == b"\x1f\x8b":
            raise InputError(
                f"{path}: expected plain JSON Lines, got gzip. Run gunzip on it first."
            )


def scan(
    file: BinaryIO,
    encode: Encode,
    *,
    defaults: Mapping[str, Any] | None = None,
    on_error: Callable[[BadRow], None] = lambda bad: None,
) -> ScanSummary:
    """Read, tokenize and measure every row; a row in error is reported to `on_error` at once."""
    digest = hashlib.sha256()
    rows: list[ScannedRow] = []
    first_lines: dict[str, int] = {}
    num_bytes = 0

    def observe(piece: bytes) -> None:
        nonlocal num_bytes
        num_bytes += len(piece)
        digest.update(piece)

    for line in read_lines(file, observe=observe):
        row = read_row(line, len(rows), defaults=defaults)
        if row.custom_id is not None:
            first = first_lines.setdefault(row.custom_id, line.number)
            if first != line.number:
                row = duplicate_of(row, first)
        scanned = _measure(row, encode)
        if scanned.bad is not None:
            on_error(scanned.bad)
        rows.append(scanned)
    return ScanSummary(rows, digest.hexdigest(), num_bytes)


def read_again(
    file: BinaryIO, scanned: ScannedRow, *, defaults: Mapping[str, Any] | None = None
) -> BatchRow:
    """Read a row that the scan accepted once more, now to run it."""
    content = read_line_at(file, scanned.offset)
    line = Line(scanned.line_number, scanned.offset, content)
    row = read_row(line, scanned.row, defaults=defaults)
    if isinstance(row, BadRow) or (row.custom_id, row.request_hash) != scanned.key:
        raise InputError(
            f"line {scanned.line_number} of the input changed while the job ran. Finished rows are "
            "kept; run the same command again to go on with the file as it is now."
        )
    return row


def _measure(row: BatchRow | BadRow, encode: Encode) -> ScannedRow:
    need = None
    if isinstance(row, BatchRow):
        try:
            params = row.params
            need = Need(
                prompt_length=len(encode(row)),
                max_tokens=params.max_tokens,
                n=params.n,
                logprobs=params.logprobs,
                prompt_logprobs=params.prompt_logprobs,
                has_stops=bool(params.stop),
            )
        except RowError as error:
            row = _bad(row, error)
    bad = row if isinstance(row, BadRow) else None
    return ScannedRow(
        row.row, row.line_number, row.offset, row.custom_id, row.request_hash, need, bad
    )


def _bad(row: BatchRow, error: RowError) -> BadRow:
    return BadRow(row.row, row.line_number, row.offset, row.custom_id, row.request_hash, error)
