"""Reads the input of a job twice: in the scan before the build, then row by row.

Each prompt is rendered and encoded in the scan, and its ids are kept for the run. They are in a
file without a name on the output's disk, so memory holds eight bytes per row, and a killed program
leaves no file. The size of the file is limited. Only a row whose ids are not kept is encoded again.

Does not know about devices. Guarantees: a row runs with the ids that the scan measured; chat
templates see the same time in all runs of a job.
"""

import os
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO

from ..console import plural
from ..errors import JournalError, RowError
from ..files.disk import open_nameless
from ..files.strict_json import Unit
from ..progress.progress import Progress
from ..rows.job_text import JobText
from ..rows.lines import BadRow, BatchRow, RequestRules
from ..rows.part import Part
from ..rows.repeats import RowDigests
from ..rows.row_files import OpenRows, unit_of
from ..rows.scan import ScannedRow, ScanSummary, read_again, scan
from .job import JobModel
from .job_files import JobFiles
from .journal import Journal
from .journal_records import INSTANT

MAX_TOKEN_BYTES = 4 * 2**30
SHARE_OF_DISK = 0.1
"""Share of the free disk space that the file may take; journal and output need the rest."""
_PIECE_BYTES = 2**20
_UNKNOWN = -1
_UINT32 = "I"


class TokenSpill:
    """A store of token ids by row; close it."""

    def __init__(self, folder: Path, *, max_bytes: int = MAX_TOKEN_BYTES):
        """Open the file in `folder`; if this fails, no ids are kept."""
        self.num_dropped = 0
        """The number of rows whose ids did not fit."""
        self._offsets = array("q")
        self._pending = bytearray()
        self._size = self._max_bytes = 0
        self._file: BinaryIO | None = None
        with suppress(OSError):
            self._file = open_nameless(folder)
            free = os.fstatvfs(self._file.fileno())
            self._max_bytes = min(max_bytes, int(SHARE_OF_DISK * free.f_bavail * free.f_frsize))

    def keep(self, row: int, ids: Sequence[int]) -> None:
        """Keep the ids of a row; rows must be passed in order, each at most once."""
        num_bytes = len(ids) * 4
        if self._file is None or self._size + num_bytes > self._max_bytes:
            self.num_dropped += 1
            return
        self._offsets.extend([_UNKNOWN] * (row - len(self._offsets)))
        self._offsets.append(self._size)
        self._pending += array(_UINT32, ids).tobytes()
        self._size += num_bytes
        if len(self._pending) >= _PIECE_BYTES:
            self._write()

    def ids_of(self, row: int, length: int) -> list[int] | None:
        """The `length` ids of a row, exactly as they were kept; None if they are not kept."""
        if self._pending:
            self._write()
        offset = self._offsets[row] if row < len(self._offsets) else _UNKNOWN
        if self._file is None or offset == _UNKNOWN:
            return None
        ids = array(_UINT32)
        try:
            ids.frombytes(os.pread(self._file.fileno(), length * 4, offset))
        except (OSError, ValueError):
            return None
        return ids.tolist() if len(ids) == length else None

    def close(self) -> None:
        """Free the space on the disk."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self) -> None:
        assert self._file is not None
        view = memoryview(bytes(self._pending))
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            # the disk is full, and the journal needs the remaining space
            self.num_dropped = sum(offset != _UNKNOWN for offset in self._offsets)
            self.close()
        self._pending.clear()


@dataclass(frozen=True)
class JobInput:
    """An open input, the tokenizer side of the model, and the token ids kept for the run."""

    rows: OpenRows
    text: JobText
    now: str
    """The local time that chat templates see, as ISO 8601."""
    part: Part
    rules: RequestRules
    token_ids: TokenSpill
    unit: Unit = "line"
    """The unit in which places in the input are counted."""
    ignored: Counter[str] = field(default_factory=Counter)
    """The number of rows with each unknown key that was ignored."""
    digests: RowDigests = field(default_factory=RowDigests)
    """Digests of the rows that this job runs, to find equal rows."""

    def scan(self, on_error: Callable[[BadRow], None], progress: Progress) -> ScanSummary:
        """Read every row of the input, and keep the token ids of the rows that this job runs."""
        file, digest = self.rows.file, self.rows.digest
        summary = scan(
            file,
            self.text.encode,
            self.rules,
            unit=self.unit,
            on_error=on_error,
            on_encoded=self._keep,
            on_progress=partial(progress.show_scan, total_bytes=os.fstat(file.fileno()).st_size),
        )
        progress.finish()
        if digest is not None:
            summary = replace(summary, input_sha256=digest.sha256, num_bytes=digest.num_bytes)
        if self.ignored:
            counts = ", ".join(f"{key!r} in {plural(n, 'row')}" for key, n in self.ignored.items())
            progress.warn(f"ignored keys that noria does not know: {counts}")
        if (reason := self.text.gave_up()) is not None:
            progress.warn(f"chat template in {reason}; rows that need it end as errors")
        if num_dropped := self.token_ids.num_dropped:
            rows = plural(num_dropped, "row")
            progress.note(f"no room to keep the token ids of {rows}; they are encoded again")
        return summary

    def read(self, scanned: ScannedRow) -> BatchRow:
        """Read a row again that the scan accepted.

        Raises:
            InputError: The row has changed since the scan.
        """
        return read_again(self.rows.file, scanned, self.rules)

    def token_ids_of(self, row: BatchRow, scanned: ScannedRow) -> Sequence[int]:
        """The token ids of a prompt.

        Raises:
            RowError: The ids were not kept, and the prompt cannot be encoded again.
        """
        assert scanned.requirements is not None
        ids = self.token_ids.ids_of(row.row, scanned.requirements.prompt_length)
        if ids is not None:
            return ids
        (encoded,) = self.text.encode([row])
        if isinstance(encoded, RowError):
            raise encoded
        return encoded

    def _keep(self, row: BatchRow, ids: Sequence[int]) -> None:
        if not self.part.has(row.row):
            return
        self.digests.add(row, ids)
        self.ignored.update(row.ignored)
        if row.prompt_token_ids is None:
            self.token_ids.keep(row.row, ids)


@contextmanager
def open_input(
    files: JobFiles, part: Part, rules: RequestRules, model: JobModel, now: str, progress: Progress
) -> Iterator[JobInput]:
    """Open the input of a job; `now` is the time that chat templates see, as ISO 8601.

    Raises:
        InputError: The input is not in the format that its name says, or the disk has no room for
            its lines.
    """
    with (
        files.open_rows(progress) as source,
        model.open_text(datetime.fromisoformat(now)) as text,
        closing(TokenSpill(files.output.parent)) as token_ids,
    ):
        yield JobInput(source, text, now, part, rules, token_ids, unit_of(files.input))


def decide_instant(given: datetime | None, journal: Journal) -> str:
    """The local time that chat templates see: the given time, or the job's start.

    Raises:
        JournalError: The journal has another time, which finished rows show.
    """
    known = journal.facts.get(INSTANT)
    if given is None:
        return known or datetime.now().isoformat(timespec="seconds")
    asked = given.isoformat()
    if known not in (None, asked):
        raise JournalError(
            f"{journal.path}: expected the time that the job was begun with, --now {known}, as its "
            f"prompts show the time, got --now {asked}. Leave the option out, choose another "
            "output, or discard the finished rows with --restart."
        )
    return asked
