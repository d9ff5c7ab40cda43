"""Reads the input of a job twice: in the scan before the build, then row by row.

Each prompt is rendered and encoded once, in the scan, and its ids are kept on the disk for the run.
Does not know about devices. Guarantees: a row runs with the ids that the scan measured; chat
templates see the same time in all runs of a job.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import Any, BinaryIO

from ..console import plural
from ..errors import JournalError, RowError
from ..files.disk import FileDigest
from ..files.strict_json import Unit
from .job import JobModel, JobSettings, JobText
from .journal import Journal
from .journal_records import INSTANT
from .lines import BadRow, BatchRow
from .part import Part
from .progress import Progress
from .repeats import RowDigests
from .row_files import open_rows, unit_of
from .scan import ScannedRow, ScanSummary, read_again, scan
from .token_spill import TokenSpill


@dataclass(frozen=True)
class JobInput:
    """An open input, the tokenizer side of the model, and the token ids kept for the run."""

    file: BinaryIO
    text: JobText
    now: str
    """The local time that chat templates see, as ISO 8601."""
    part: Part
    defaults: Mapping[str, Any]
    token_ids: TokenSpill
    digest: FileDigest | None = None
    """The digest of an input that was converted; None if `file` is the input itself."""
    unit: Unit = "line"
    """The unit in which places in the input are counted."""
    ignores_unknown: bool = False
    ignored: Counter[str] = field(default_factory=Counter)
    """The number of rows with each unknown key that was ignored."""
    models: Mapping[str, str | None] | None = None
    """The adapter of rows by their `model`, as in `JobSettings`."""
    digests: RowDigests = field(default_factory=RowDigests)
    """Digests of the rows that this job runs, to find equal rows."""

    def scan(self, on_error: Callable[[BadRow], None], progress: Progress) -> ScanSummary:
        """Read every row of the input, and keep the token ids of the rows that this job runs."""
        summary = scan(
            self.file,
            self.text.encode,
            defaults=self.defaults,
            ignores_unknown=self.ignores_unknown,
            models=self.models,
            unit=self.unit,
            on_error=on_error,
            on_encoded=self._keep,
            on_progress=partial(
                progress.show_scan, total_bytes=os.fstat(self.file.fileno()).st_size
            ),
        )
        progress.finish()
        if self.digest is not None:
            summary = replace(
                summary, input_sha256=self.digest.sha256, num_bytes=self.digest.num_bytes
            )
        if self.ignored:
            counts = ", ".join(f"{key!r} in {plural(n, 'row')}" for key, n in self.ignored.items())
            progress.note(f"ignored keys that noria does not know: {counts}")
        if (reason := self.text.gave_up()) is not None:
            progress.note(f"chat template in {reason}; rows that need it end as errors")
        if num_dropped := self.token_ids.num_dropped:
            rows = plural(num_dropped, "row")
            progress.note(f"no room to keep the token ids of {rows}; they are encoded again")
        return summary

    def read(self, scanned: ScannedRow) -> BatchRow:
        """Read a row again that the scan accepted.

        Raises:
            InputError: The row has changed since the scan.
        """
        return read_again(
            self.file,
            scanned,
            defaults=self.defaults,
            ignores_unknown=self.ignores_unknown,
            models=self.models,
        )

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
    settings: JobSettings, model: JobModel, now: str, progress: Progress
) -> Iterator[JobInput]:
    """Open the input of a job; `now` is the time that chat templates see, as ISO 8601.

    Raises:
        InputError: The input is no table or compressed file of its name's format.
    """
    folder = settings.output_path.parent
    rows = open_rows(
        settings.input_path,
        settings.columns,
        folder,
        note=progress.note,
        on_progress=progress.show_reading,
    )
    with (
        rows as (file, digest),
        model.open_text(datetime.fromisoformat(now)) as text,
        TokenSpill(folder) as token_ids,
    ):
        yield JobInput(
            file,
            text,
            now,
            settings.part,
            settings.sampling_defaults,
            token_ids,
            digest,
            unit_of(settings.input_path),
            settings.ignores_unknown,
            models=settings.models,
        )


def decide_instant(settings: JobSettings, journal: Journal) -> str:
    """The local time that chat templates see: the time in the settings, or the job's start.

    Raises:
        JournalError: The journal has another time, which finished rows show.
    """
    known = journal.facts.get(INSTANT)
    if settings.now is None:
        return known or datetime.now().isoformat(timespec="seconds")
    asked = settings.now.isoformat()
    if known not in (None, asked):
        raise JournalError(
            f"{journal.path}: expected the time that the job was begun with, --now {known}, as its "
            f"prompts show the time, got --now {asked}. Leave the option out, choose another "
            "output, or discard the finished rows with --restart."
        )
    return asked


def record_instant(now: str, journal: Journal) -> None:
    """Bind later runs of a job to the time that its prompts show."""
    if INSTANT not in journal.facts:
        journal.record_fact(INSTANT, now)
