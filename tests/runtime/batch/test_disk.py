"""Files are written whole: after a failure the old file is unchanged, without any other file."""

import errno
import os

import pytest
from faulty_disk import FaultyDisk

from noria.runtime.files.disk import Disk, replace_file


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_full_disk_leaves_the_old_file_and_no_temporary_one(tmp_path):
    path = tmp_path / "plan.toml"
    counter = FaultyDisk(0)
    replace_file(counter, path, [b"old ", b"plan"])
    # the last two operations sync the folder, which has the new file by then
    for at in range(1, counter.calls - 1):
        full = FaultyDisk(at, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), tear=True)
        with pytest.raises(OSError, match="No space left"):
            replace_file(full, path, [b"new ", b"plan"])
        assert contents(tmp_path) == {"plan.toml": b"old plan"}, f"after operation {at}"


def test_a_file_is_synced_whole_before_it_gets_its_name(tmp_path):
    steps = []

    class WatchedDisk(Disk):
        def fsync(self, descriptor):
            super().fsync(descriptor)
            steps.append(("synced", os.fstat(descriptor).st_size))

        def rename(self, source, target):
            super().rename(source, target)
            steps.append(("renamed", target.name))

    replace_file(WatchedDisk(), tmp_path / "plan.toml", [b"new ", b"plan"])
    assert steps[:2] == [("synced", 8), ("renamed", "plan.toml")]


def test_content_that_cannot_be_made_leaves_no_temporary_file(tmp_path):
    def lines():
        yield b"one"
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        replace_file(Disk(), tmp_path / "out.jsonl", lines())
    assert contents(tmp_path) == {}
