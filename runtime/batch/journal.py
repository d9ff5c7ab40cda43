"""The journal of a job: every finished row, on disk, in the order of completion.

Each line is one record: CRC-32 of the rest in eight hexadecimal digits, a space, the record's facts
as JSON, and for a row a tab and its output line as in the final file. JSON has no raw tab or
newline, so neither needs escaping. The kinds of records are `header` (format, configuration),
`fact` (a decision that all later runs of the job keep, such as the resolved plan), `row`, `setup`
(other processes than before continue the job), and `run` (the figures of a run; the last record of
a run counts, together with the rows after it).

A row is found again by custom_id and request hash, so an edited input keeps its unchanged rows.

Does not know about models, requests or the final file. Guarantees: a row survives the death of the
process as soon as `record_row` returns. It survives a power cut after a sync: after 64 rows, after
about a second (the job calls `sync_if_due` at every step), or on `close`. An incomplete record at
the end is removed on opening; damage anywhere else is an error that gives the byte.
"""

import json
import os
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import JournalError, JournalWriteError
from ..files.disk import Disk, replace_file
from ..files.strict_json import dump_line
from ..rows.lines import PlacedRow
from .job_runs import JobRun
from .journal_records import (
    DEVICES,
    FORMAT,
    OF_DEVICES,
    OUTPUTS,
    PLAN,
    SETUP,
    BadRecord,
    check_same_configuration,
    is_foreign,
    read_record,
)

SYNC_ROWS = 64
SYNC_SECONDS = 1.0


def renew(path: Path, disk: Disk) -> None:
    """Replace a journal by a copy, if there is one.

    A process that has the old file open, such as a paused one that wakes, no longer writes into
    the journal that is read.
    """
    if path.exists():
        with path.open("rb") as file:
            replace_file(disk, path, iter(partial(file.read, 2**20), b""))


@dataclass(frozen=True, slots=True)
class JournalRow:
    """One finished row: the figures for the manifest, and the place of its output line."""

    code: str | None
    """The error code; None for a result."""
    metrics: Mapping[str, float]
    offset: int
    """Byte offset of the output line in the journal."""
    length: int
    """Bytes of the output line, without a line ending."""


class Journal:
    """An open journal; open it while the job's lock is held, and close it.

    Args:
        path: The journal's file, which is created if it is absent.
        configuration: The configuration of the job.
        may_differ: Keys of the configuration whose values may differ from the stored ones. A new
          set-up of processes is recorded. On other devices, the journal has no plan.
        keeps_plan: Whether the job cannot continue on other devices.
        disk: Disk operations.
        clock: Monotonic seconds.

    Raises:
        JournalError: The file is damaged, is no journal, or has another configuration; then the
          error lists every difference.
    """

    def __init__(
        self,
        path: Path,
        configuration: Mapping[str, str],
        *,
        may_differ: Collection[str] = (),
        keeps_plan: bool = False,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.path = path
        self.facts: dict[str, str] = {}
        """Decisions that all runs of the job keep, by name; see `record_fact`."""
        self.rows: dict[tuple[str, str], JournalRow] = {}
        self.setups: list[str] = []
        """All set-ups of processes that have run the job, the current one last."""
        self.runs: list[JobRun] = []
        """All runs of the job, the current one last once it is recorded."""
        self.plan_before: str | None = None
        """The plan of the job on other devices, until a plan for the present ones is recorded."""
        self._disk = disk or Disk()
        self._clock = clock
        self._size = 0
        self._unsynced = 0
        self._last_sync = clock()
        self._descriptor = self._disk.open_append(path)
        try:
            self._recover(dict(configuration), may_differ, keeps_plan)
        except BaseException:
            self._disk.close(self._descriptor)
            raise

    @property
    def plan(self) -> str | None:
        """The resolved plan, once it is known."""
        return self.facts.get(PLAN)

    @property
    def binds(self) -> bool:
        """Whether rows or outputs depend on the journal, so that the next run continues its job."""
        return self.plan is not None or bool(self.rows) or OUTPUTS in self.facts

    def record_fact(self, name: str, value: str) -> None:
        """Store a decision durably, before rows of this run or a later run depend on it.

        Not every fact binds the next run; see `binds`.
        """
        self._append({"kind": "fact", "name": name, "value": value})
        self.sync()
        self._take_fact(name, value)

    def record_run(self, number: int) -> None:
        """Store the present figures of a run; without a sync, as they bind nothing."""
        self._append({"kind": "run", "number": number, "run": asdict(self.runs[number])})

    def record_row(
        self,
        row: PlacedRow,
        line: Mapping[str, Any],
        code: str | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Append one finished row.

        Args:
            row: The row of the input.
            line: The output line, as in the final file.
            code: The error code; None for a result.
            metrics: Figures that the manifest sums over rows.

        Raises:
            JournalWriteError: The disk refused the record; earlier records are kept.
        """
        facts = {
            "kind": "row",
            "row": row.row,
            "custom_id": row.custom_id,
            "request": row.request_hash,
            "code": code,
            "metrics": dict(metrics or {}),
        }
        content = dump_line(line)
        end = self._append(facts, content)
        self._remember(facts, end - 1 - len(content), len(content))
        self._unsynced += 1
        self.sync_if_due()

    def output_line(self, row: JournalRow) -> bytes:
        """Read the output line of a row, without a line ending."""
        return os.pread(self._descriptor, row.length, row.offset)

    def sync_if_due(self) -> None:
        """Sync if `SYNC_ROWS` rows are not yet on the disk.

        Sync also if any row is not, and the last sync is at least `SYNC_SECONDS` ago.
        """
        is_late = self._unsynced and self._clock() - self._last_sync >= SYNC_SECONDS
        if is_late or self._unsynced >= SYNC_ROWS:
            self.sync()

    def sync(self) -> None:
        """Wait until all records are on the disk.

        Raises:
            JournalWriteError: The disk refused the records.
        """
        try:
            self._disk.fsync(self._descriptor)
        except OSError as error:
            raise self._write_error(error) from error
        self._unsynced = 0
        self._last_sync = self._clock()

    def close(self) -> None:
        """Sync records that are not yet on the disk, and close."""
        try:
            if self._unsynced:
                self.sync()
        finally:
            self._disk.close(self._descriptor)

    def _append(self, facts: Mapping[str, Any], line: bytes | None = None) -> int:
        """Append a record; return the new size of the file."""
        payload = dump_line(facts)
        if line is not None:
            payload += b"\t" + line
        record = b"%08x %s\n" % (zlib.crc32(payload), payload)
        try:
            self._disk.write(self._descriptor, record)
        except OSError as error:
            with suppress(OSError):  # the next opening removes what is left of the record
                self._disk.truncate(self._descriptor, self._size)
            raise self._write_error(error) from error
        self._size += len(record)
        return self._size

    def _write_error(self, error: OSError) -> JournalWriteError:
        return JournalWriteError(
            error.errno,
            f"{self.path}: cannot be written ({error.strerror or error}). {len(self.rows)} "
            "finished rows are kept in it; free disk space and run the same command again to "
            "continue",
        )

    def _recover(
        self, configuration: dict[str, str], may_differ: Collection[str], keeps_plan: bool
    ) -> None:
        """Read the stored records, check the configuration, and repair or begin the file."""
        header, damaged_at = self._read_records()
        if header is not None and not self.binds:
            # nothing depends on this journal, so it does not bind the job to its configuration
            runs = self.runs if header["configuration"] == configuration else []
            self._discard()
            self.runs = runs
            header, damaged_at = None, None
        changed, devices = {}, {}
        if header is not None:
            devices = json.loads(self.facts.get(DEVICES, "{}"))
            stored = {**header["configuration"], **devices, SETUP: self.setups[-1]}
            wanted = {SETUP: "", **configuration}
            changed = {key: wanted[key] for key in may_differ if stored.get(key) != wanted[key]}
            check_same_configuration(self.path, stored | changed, wanted, keeps_plan=keeps_plan)
        if damaged_at is not None:
            # a file that has no header must be the beginning of one
            if header is None and is_foreign(os.pread(self._descriptor, 32, 0)):
                raise JournalError(
                    f"{self.path}: damaged at byte 0, or not a journal. Move it away, or discard "
                    "it with --restart."
                )
            self._disk.truncate(self._descriptor, self._size)
        if header is None:
            self._append({"kind": "header", "format": FORMAT, "configuration": configuration})
            for number in range(len(self.runs)):
                self.record_run(number)
            self.sync()
            self._disk.sync_folder(self.path.parent)
        elif changed := {key: changed[key] for key in OF_DEVICES if key in changed}:
            self.record_fact(DEVICES, json.dumps(devices | changed))
        setup = configuration.get(SETUP, "")
        if self.setups[-1:] != [setup]:
            if self.setups:
                self._append({"kind": "setup", "setup": setup})
                self.sync()
            self.setups.append(setup)

    def _read_records(self) -> tuple[dict[str, Any] | None, int | None]:
        """Read all complete records into memory.

        Returns:
            The header, if there is one, and the offset of an incomplete record at the end, if any.

        Raises:
            JournalError: A record is wrong, or is damaged although complete records follow.
        """
        header, damaged_at = None, None
        for offset, payload in self._stored_records():
            if payload is None:
                damaged_at = offset if damaged_at is None else damaged_at
                continue
            if damaged_at is not None:
                raise JournalError(
                    f"{self.path}: damaged at byte {damaged_at}, with complete records after it, "
                    "so the cause is not an interrupted write. Restore the file, or discard it "
                    "with --restart."
                )
            facts, line = self._check_record(offset, payload, is_first=header is None)
            header = header or facts
            end = offset + 9 + len(payload)  # after eight digits and a space
            self._load(facts, end - len(line), len(line))
            self._size = end + 1
        return header, damaged_at

    def _load(self, facts: Mapping[str, Any], offset: int, length: int) -> None:
        """Take a stored record into memory; a row's output line is at `offset`."""
        match facts["kind"]:
            case "header":
                self.setups.append(facts["configuration"].get(SETUP, ""))
            case "fact":
                self._take_fact(facts["name"], facts["value"])
            case "setup":
                self.setups.append(facts["setup"])
            case "run":
                # a later record of a run replaces the earlier one
                self.runs[facts["number"] :] = [JobRun(**facts["run"])]
            case _:
                self._remember(facts, offset, length)

    def _take_fact(self, name: str, value: str) -> None:
        """Take a fact into memory; the plan of other devices is no longer the plan."""
        if name == DEVICES:
            self.plan_before = self.facts.pop(PLAN, self.plan_before)
        elif name == PLAN:
            self.plan_before = None
        self.facts[name] = value

    def _discard(self) -> None:
        """Empty the file, and forget its records."""
        self._disk.truncate(self._descriptor, 0)
        self._size, self.plan_before = 0, None
        self.setups.clear()
        self.facts.clear()
        self.rows.clear()

    def _stored_records(self) -> Iterator[tuple[int, bytes | None]]:
        """The offset and the payload of every line; the payload of a damaged line is None."""
        # from its start, even if another file has its name in the meantime
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            offset = file.seek(0)
            for record in file:
                payload = record[9:-1]
                is_whole = record.endswith(b"\n") and record[:9] == b"%08x " % zlib.crc32(payload)
                yield offset, payload if is_whole else None
                offset += len(record)

    def _check_record(
        self, offset: int, payload: bytes, *, is_first: bool
    ) -> tuple[dict[str, Any], bytes]:
        """The facts and the output line of a complete record, after checks."""
        try:
            facts, line = read_record(payload)
            if is_first != (facts["kind"] == "header"):
                expected = "a header first" if is_first else "one header"
                raise BadRecord(f"expected {expected}, got {facts['kind']!r}")
        except BadRecord as error:
            raise JournalError(
                f"{self.path}: the record at byte {offset} is complete, but wrong: {error}. "
                "Restore the file, or discard it with --restart."
            ) from None
        return facts, line

    def _remember(self, facts: Mapping[str, Any], offset: int, length: int) -> None:
        """Keep the figures and the place of a row, and count it for the last run."""
        if self.runs:
            self.runs[-1].count(facts["metrics"])
        key = facts["custom_id"], facts["request"]
        row = JournalRow(facts["code"], facts["metrics"], offset, length)
        # the first record of a row counts, unless it is an error that later runs try again
        known = self.rows.get(key)
        if known is None or known.code in RETRIED_CODES:
            self.rows[key] = row


RETRIED_CODES = frozenset({"internal_error"})
"""Error codes of noria or the machine, not of the request: a resumed job runs these rows again."""
