"""The journal's rows, and the moment from which they survive a power cut."""

import os
import time
from collections.abc import Callable

from fake_model import FakeGenerator, FakeModel, run, write_input

from noria.runtime.batch import journal as journal_module
from noria.runtime.batch.journal import SYNC_ROWS, SYNC_SECONDS, Journal
from noria.runtime.files.disk import Disk
from noria.runtime.rows.lines import PlacedRow


class CountingDisk(Disk):
    def __init__(self):
        self.num_syncs = self.synced_bytes = 0

    def fsync(self, descriptor):
        self.num_syncs += 1
        self.synced_bytes = os.fstat(descriptor).st_size
        super().fsync(descriptor)


class OpenJournal:
    """A journal with a clock that only the test advances."""

    def __init__(self, folder):
        self.now = 0.0
        self.disk = CountingDisk()
        path = folder / "out.jsonl.journal"
        self.journal = Journal(path, {}, disk=self.disk, clock=lambda: self.now)
        self.disk.num_syncs = 0

    def record(self, count: int) -> None:
        for _ in range(count):
            row = len(self.journal.rows)
            self.journal.record_row(PlacedRow(row, row + 1, 0, f"{row}", ""), {})


def test_rows_are_synced_when_they_are_many(tmp_path):
    opened = OpenJournal(tmp_path)
    opened.record(SYNC_ROWS - 1)
    assert opened.disk.num_syncs == 0
    opened.record(1)
    assert opened.disk.num_syncs == 1


def test_few_rows_are_synced_after_a_while_though_no_other_follows(tmp_path):
    opened = OpenJournal(tmp_path)
    opened.record(40)
    opened.now = SYNC_SECONDS / 2
    opened.journal.sync_if_due()
    assert opened.disk.num_syncs == 0
    for opened.now in (SYNC_SECONDS, 600.0):
        opened.journal.sync_if_due()
        assert opened.disk.num_syncs == 1, "once is enough"


def test_closing_syncs_what_is_left_and_nothing_else(tmp_path):
    for count in (1, 0):
        opened = OpenJournal(tmp_path)
        opened.record(count)
        opened.journal.close()
        assert opened.disk.num_syncs == count


class Pausing(FakeGenerator):
    """A generator that finishes no row for a while after the first rows."""

    def __init__(self, at_end_of_pause: Callable[[], object]):
        super().__init__()
        self._num_pauses = 10
        self._at_end_of_pause = at_end_of_pause

    def step(self):
        if self.num_steps < 3 or not self._num_pauses:
            return super().step()
        time.sleep(0.02)
        self._num_pauses -= 1
        if not self._num_pauses:
            self._at_end_of_pause()
        return []


def test_a_job_syncs_its_rows_while_no_other_is_finished(tmp_path, monkeypatch):
    monkeypatch.setattr(journal_module, "SYNC_SECONDS", 0.05)
    disk, seen = CountingDisk(), []
    journal = tmp_path / "out.jsonl.journal"
    generator = Pausing(lambda: seen.append((disk.synced_bytes, journal.read_bytes())))
    run(write_input(tmp_path / "in.jsonl"), tmp_path / "out.jsonl", FakeModel(generator), disk)
    ((synced_bytes, content),) = seen
    assert content.count(b'"kind":"row"') >= 4
    assert synced_bytes == len(content)
