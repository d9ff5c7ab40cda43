"""The journal of a job: every finished row, on disk, in the order of completion.

One record a line: CRC-32 of the rest in eight hexadecimal digits, a space, the record's facts as
JSON, and for a row a tab and the output line as it will stand in the final file. JSON holds no raw
tab or newline, so neither needs escaping. Records are `header` (format, configuration), `fact`
(what the job decides once and every later run of it keeps, such as the resolved plan), `row`, and
`setup` where other processes than before continue the job.

A row is found again by custom_id and request hash, so an edited input keeps what is unchanged.

Knows nothing of models, requests or the final file. Guarantees: a row survives the death of the
process as soon as `record_row` returns. It survives a power cut once it is synced: after 64 rows,
after about a second (the job calls `sync_if_due` at every step), or on `close`. A torn tail is cut
off on opening; damage anywhere else is an error that says at which byte.
"""

import os
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import JournalError, JournalWriteError
from ..files.disk import Disk
from ..files.strict_json import dump_line
from .journal_records import FORMAT, PLAN, SETUP, BadRecord, read_record

SYNC_ROWS = 64
SYNC_SECONDS = 1.0


def journal_path(output: Path) -> Path:
    return output.with_name(f"{output.name}.journal")


@dataclass(frozen=True, slots=True)
class JournalRow:
    """One finished row: what the manifest counts, and where its output line lies."""

    custom_id: str
    request_hash: str
    code: str | None
    """None for a result, else the error code."""
    metrics: Mapping[str, float]
    offset: int
    length: int


class Journal:
    """An open journal. Make one with `Journal.open`, and hold the job's lock meanwhile."""

    def __init__(self, path: Path, disk: Disk, clock: Callable[[], float]):
        self.path = path
        self.facts: dict[str, str] = {}
        """Decisions that all runs of the job keep, by name: see `record_fact`."""
        self.rows: dict[tuple[str, str], JournalRow] = {}
        self.setups: list[str] = []
        """Every set-up of processes that has run the job, this one last."""
        self._disk = disk
        self._clock = clock
        self._size = 0
        self._unsynced = 0
        self._last_sync = clock()
        self._descriptor = disk.open_append(path)

    @classmethod
    def open(
        cls,
        path: Path,
        configuration: Mapping[str, str],
        *,
        may_differ: Collection[str] = (),
        disk: Disk | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> "Journal":
        """Open or create; refuse a journal of another configuration, naming every difference.

        Where the set-up may differ, going on with another one is recorded.
        """
        journal = cls(path, disk or Disk(), clock)
        try:
            journal._recover(dict(configuration), may_differ)
        except BaseException:
            journal._disk.close(journal._descriptor)
            raise
        return journal

    @property
    def plan(self) -> str | None:
        """The resolved plan, once it is known."""
        return self.facts.get(PLAN)

    def record_fact(self, name: str, value: str) -> None:
        """Store a decision durably: rows may depend on it from here on, in this run and later ones.

        A journal that has a plan binds the next run; other facts do not by themselves.
        """
        self._append({"kind": "fact", "name": name, "value": value})
        self.sync()
        self.facts[name] = value

    def record_row(
        self,
        *,
        row: int,
        custom_id: str,
        request_hash: str,
        line: Mapping[str, Any],
        code: str | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Append one finished row with its output line."""
        facts = {
            "kind": "row",
            "row": row,
            "custom_id": custom_id,
            "request": request_hash,
            "code": code,
            "metrics": dict(metrics or {}),
        }
        content = dump_line(line)
        end = self._append(facts, content)
        self._remember(facts, end - 1 - len(content), len(content))
        self._unsynced += 1
        self.sync_if_due()

    def output_line(self, row: JournalRow) -> bytes:
        """Read a row's output line back, without a line ending."""
        return os.pread(self._descriptor, row.length, row.offset)

    def sync_if_due(self) -> None:
        """Sync where many rows, or any for about a second, are not on the disk yet."""
        is_late = self._unsynced and self._clock() - self._last_sync >= SYNC_SECONDS
        if is_late or self._unsynced >= SYNC_ROWS:
            self.sync()

    def sync(self) -> None:
        """Wait until all records are on the disk."""
        try:
            self._disk.fsync(self._descriptor)
        except OSError as error:
            raise self._write_error(error) from error
        self._unsynced = 0
        self._last_sync = self._clock()

    def close(self) -> None:
        """Sync what is not on the disk yet, and close."""
        try:
            if self._unsynced:
                self.sync()
        finally:
            self._disk.close(self._descriptor)

    def _append(self, facts: Mapping[str, Any], line: bytes | None = None) -> int:
        payload = dump_line(facts)
        if line is not None:
            payload += b"\t" + line
        record = b"%08x %s\n" % (zlib.crc32(payload), payload)
        try:
            self._disk.write(self._descriptor, record)
        except OSError as error:
            self._cut_to(self._size)
            raise self._write_error(error) from error
        self._size += len(record)
        return self._size

    def _cut_to(self, size: int) -> None:
        """Remove a half-written record; should that fail too, the next opening does it."""
        try:
            self._disk.truncate(self._descriptor, size)
        except OSError:
            return

    def _write_error(self, error: OSError) -> JournalWriteError:
        return JournalWriteError(
            error.errno,
            f"{self.path}: cannot be written ({error.strerror or error}). {len(self.rows)} "
            "finished rows are kept in it; make room and run the same command again to go on",
        )

    def _recover(self, configuration: dict[str, str], may_differ: Collection[str]) -> None:
        damaged_at: int | None = None
        header = None
        for offset, payload in self._stored_records():
            if payload is None:
                damaged_at = offset if damaged_at is None else damaged_at
                continue
            if damaged_at is not None:
                raise JournalError(
                    f"{self.path}: damaged at byte {damaged_at}, with good records after it, so "
                    "this is no interrupted write. Restore the file, or discard it with --restart."
                )
            facts, line = self._read(offset, payload, is_first=header is None)
            end = offset + 9 + len(payload)  # after eight digits and a space
            if header is None:
                header = facts
                self.setups.append(facts["configuration"].get(SETUP, ""))
            elif facts["kind"] == "fact":
                self.facts[facts["name"]] = facts["value"]
            elif facts["kind"] == "setup":
                self.setups.append(facts["setup"])
            else:
                self._remember(facts, end - len(line), len(line))
            self._size = end + 1
        if header is not None and self.plan is None and not self.rows:
            # nothing was decided under it, so a job that was refused does not bind the next one
            self._disk.truncate(self._descriptor, 0)
            header, self._size, damaged_at = None, 0, None
            self.setups.clear()
            self.facts.clear()
        if header is not None:
            stored = {**header["configuration"], SETUP: self.setups[-1]}
            wanted = {SETUP: "", **configuration}
            for key in may_differ:
                stored[key] = wanted[key]
            check_same_configuration(self.path, stored, wanted)
        if damaged_at is not None:
            self._refuse_foreign_file(header)
            self._disk.truncate(self._descriptor, self._size)
        if header is None:
            self._append({"kind": "header", "format": FORMAT, "configuration": configuration})
            self.sync()
            self._disk.sync_folder(self.path.parent)
        setup = configuration.get(SETUP, "")
        if self.setups and self.setups[-1] != setup:
            self._append({"kind": "setup", "setup": setup})
            self.sync()
        if self.setups[-1:] != [setup]:
            self.setups.append(setup)

    def _stored_records(self) -> Iterator[tuple[int, bytes | None]]:
        """Every line of the file as (offset, payload); the payload is None where it is damaged."""
        with self._opened() as file:
            offset = 0
            for record in file:
                payload = record[9:-1]
                is_whole = record.endswith(b"\n") and record[:9] == b"%08x " % zlib.crc32(payload)
                yield offset, payload if is_whole else None
                offset += len(record)

    def _opened(self) -> BinaryIO:
        """The opened file from its start, even if another file has its name by now."""
        file = os.fdopen(os.dup(self._descriptor), "rb")
        file.seek(0)
        return file

    def _read(self, offset: int, payload: bytes, *, is_first: bool) -> tuple[dict[str, Any], bytes]:
        """The facts and the output line of a whole record."""
        try:
            facts, line = read_record(payload)
            if is_first != (facts["kind"] == "header"):
                expected = "a header first" if is_first else "one header"
                raise BadRecord(f"expected {expected}, got {facts['kind']!r}")
        except BadRecord as error:
            raise JournalError(
                f"{self.path}: the record at byte {offset} is whole, but wrong: {error}. Restore "
                "the file, or discard it with --restart."
            ) from None
        return facts, line

    def _refuse_foreign_file(self, header: object) -> None:
        """A file without a header is a torn first write, or not ours: never cut the latter."""
        if header is not None:
            return
        start = os.pread(self._descriptor, 32, 0)
        # the start of our first record, as far as it was written
        if b"\n" in start or (len(start) > 9 and not b'{"kind":"header"'.startswith(start[9:25])):
            raise JournalError(
                f"{self.path}: damaged at byte 0, or not a journal. Move it away, or discard it "
                "with --restart."
            )

    def _remember(self, facts: Mapping[str, Any], offset: int, length: int) -> None:
        key = (facts["custom_id"], facts["request"])
        row = JournalRow(*key, facts["code"], facts["metrics"], offset, length)
        # the first record counts, but an error that may pass is replaced by what came later
        known = self.rows.get(key)
        if known is None or known.code in RETRIED_CODES:
            self.rows[key] = row


RETRIED_CODES = frozenset({"internal_error"})
"""Errors of ours, not of the request: a resumed job tries such rows again."""


def check_same_configuration(
    path: Path, stored: Mapping[str, str], wanted: Mapping[str, str]
) -> None:
    """Raise JournalError with one line for each difference between two configurations."""
    found = differences(stored, wanted, ("there", "now"))
    if found:
        raise JournalError(
            f"{path}: expected the configuration of this job, got another one:\n"
            + "\n".join(found)
            + "\nRun with the settings it was begun with, choose another output, or discard it "
            f"with --restart.{_SETUP_REMEDY if stored.get(SETUP) != wanted.get(SETUP) else ''}"
        )


_SETUP_REMEDY = (
    " Other processes and devices add up in another order; --allow-different-numerics goes on all "
    "the same, and the manifest says so."
)


def differences(
    first: Mapping[str, object], second: Mapping[str, object], names: tuple[str, str]
) -> list[str]:
    """One line for each key whose values differ, with both; `names` say whose they are."""
    return [
        f"  {key}: {names[0]} {first.get(key, 'nothing')}, {names[1]} {second.get(key, 'nothing')}"
        for key in sorted({*first, *second})
        if first.get(key) != second.get(key)
    ]
