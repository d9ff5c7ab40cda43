"""The digest of weights: it covers every byte, is computed in shares, and is never stale."""

import hashlib
import json
import os
import threading
from argparse import ArgumentTypeError
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from noria.runtime.checkpoint import WeightsDigest
from noria.runtime.checkpoint import weights_digest as module
from noria.runtime.checkpoint.weights_digest import HashRootCache
from noria.runtime.commands.batch_command import weights_digest
from noria.runtime.errors import CheckpointChanged
from noria.runtime.files.file_facts import FileFacts
from noria.runtime.pods.peers import Peers

BLOCK = 1000


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(module, "BLOCK_BYTES", BLOCK)
    monkeypatch.setattr(module, "PIECE_BYTES", 300)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "noria" / "weights"


@pytest.fixture
def settled(monkeypatch):
    """Treat files of the test as written long ago."""
    monkeypatch.setattr(module, "SETTLED_NS", -(10**18))


@pytest.fixture
def hashed(monkeypatch) -> list[module.FileBlock]:
    """A list of every block that any process hashes."""
    blocks, hash_block = [], module._hash_block

    def count(path, block):
        blocks.append(block)
        return hash_block(path, block)

    monkeypatch.setattr(module, "_hash_block", count)
    return blocks


def write_files(folder: Path, size: int = 5 * BLOCK + 7) -> dict[str, Path]:
    folder.mkdir()
    files = {"a": folder / "a", "b": folder / "b", "empty": folder / "empty"}
    for name, path in files.items():
        path.write_bytes(bytes(ord(name[0]) ^ i % 251 for i in range(size)) * (name != "empty"))
    return files


def digest_of(files: dict[str, Path]) -> str:
    return WeightsDigest(files).result()


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1]))


def test_it_is_a_tree_over_blocks_in_the_order_of_names(tmp_path):
    files = write_files(tmp_path / "m")
    lines = b"noria weights 1\n"
    for name, path in files.items():
        content = path.read_bytes()
        blocks = [content[i : i + BLOCK] for i in range(0, len(content), BLOCK)]
        root = hashlib.sha256(b"".join(hashlib.sha256(block).digest() for block in blocks))
        lines += f"{name}\0{len(content)}\0{root.hexdigest()}\n".encode()
    expected = f"sha256:{hashlib.sha256(lines).hexdigest()}"
    assert digest_of(files) == expected
    assert digest_of(dict(reversed(files.items()))) == expected
    assert digest_of(write_files(tmp_path / "copy")) == expected


@pytest.mark.parametrize("position", [0, BLOCK - 1, BLOCK, 2 * BLOCK + 500, 5 * BLOCK + 6])
def test_every_byte_counts(tmp_path, position):
    files = write_files(tmp_path / "m")
    before = digest_of(files)
    flip(files["b"], position)
    assert digest_of(files) != before


def test_names_and_sizes_count(tmp_path):
    files = write_files(tmp_path / "m")
    a, b = files["a"], files["b"]
    assert len({digest_of({"a": a, "b": b}), digest_of({"a": b, "b": a}), digest_of({"a": a})}) == 3


def test_an_unchanged_file_is_hashed_once(tmp_path, settled, hashed):
    files = write_files(tmp_path / "m")
    before = digest_of(files)
    assert len(hashed) == 12
    (tmp_path / "m").rename(tmp_path / "moved")
    assert digest_of({name: tmp_path / "moved" / name for name in files}) == before
    assert len(hashed) == 12


def test_a_file_rewritten_in_place_is_hashed_again_although_its_mtime_was_set_back(
    tmp_path, settled, hashed
):
    files = write_files(tmp_path / "m")
    before = digest_of(files)
    status = files["a"].stat()
    flip(files["a"], 2500)
    os.utime(files["a"], ns=(status.st_atime_ns, status.st_mtime_ns))
    assert files["a"].stat().st_mtime_ns == status.st_mtime_ns
    hashed.clear()
    assert digest_of(files) != before
    assert {block.file for block in hashed} == {"a"}


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path, own_cache):
    path = tmp_path / "a"
    path.write_bytes(b"x")
    facts, root = FileFacts.of(path), hashlib.sha256(b"").hexdigest()
    for seconds, is_kept in ((-60, False), (0, False), (1.9, False), (2.1, True)):
        now = facts.ctime_ns + int(seconds * 1e9)
        HashRootCache(own_cache, lambda now=now: now).add({facts: root})
        assert (HashRootCache(own_cache).get(facts) == root) == is_kept


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"1 2 3 4 5": 7}', b'{"1 2 3 4 5": "short"}', b"[" * 10**5, b"\xff"],
)
def test_a_cache_that_is_damaged_is_written_anew(tmp_path, own_cache, settled, hashed, content):
    files = write_files(tmp_path / "m")
    before = digest_of(files)
    (own_cache / module.NAME).write_bytes(content)
    hashed.clear()
    assert digest_of(files) == before and len(hashed) == 12
    assert digest_of(files) == before and len(hashed) == 12


@pytest.mark.parametrize("which", ["folder", "file"])
def test_a_cache_that_others_can_write_is_not_believed(tmp_path, own_cache, settled, which):
    files = write_files(tmp_path / "m")
    before = digest_of(files)
    cache = own_cache / module.NAME
    kept = json.loads(cache.read_text())
    cache.write_text(json.dumps(dict.fromkeys(kept, "0" * 64)))
    assert digest_of(files) != before, "the test's lie would be believed"
    (own_cache if which == "folder" else cache).chmod(0o777)
    assert digest_of(files) == before


def test_a_cache_that_cannot_be_written_costs_nothing_but_time(tmp_path, own_cache, settled):
    files = write_files(tmp_path / "m")
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text("a file where the folder would be")
    assert digest_of(files) == digest_of(files)
    assert own_cache.read_text() == "a file where the folder would be"


def test_the_cache_keeps_the_newest_and_is_bounded(own_cache, settled, monkeypatch):
    monkeypatch.setattr(module, "MAX_FILES", 5)
    files = [FileFacts(1, inode, 3, 4, 5) for inode in range(8)]
    for file in files:
        HashRootCache(own_cache).add({file: "0" * 64})
    kept = HashRootCache(own_cache)
    assert [kept.get(file) is not None for file in files] == [False] * 3 + [True] * 5


def test_a_change_between_the_start_and_the_end_is_an_error(tmp_path):
    files = write_files(tmp_path / "m")
    digest = WeightsDigest(files)
    digest.start()
    flip(files["a"], 2500)
    with pytest.raises(CheckpointChanged, match=r"expected the file as it was opened.*ctime_ns"):
        digest.result()


def test_a_remembered_file_that_changes_while_it_is_loaded_is_an_error(tmp_path, settled, hashed):
    files = write_files(tmp_path / "m")
    digest_of(files)
    digest = WeightsDigest(files)
    digest.start()
    assert len(hashed) == 12
    os.truncate(files["b"], 10)
    with pytest.raises(CheckpointChanged, match=r"size 5007 to 10"):
        digest.result()


def test_a_file_cut_short_while_it_is_hashed_is_an_error(tmp_path, monkeypatch):
    files = write_files(tmp_path / "m")
    hash_block = module._hash_block

    def cut(path, block):
        os.truncate(path, 10)
        return hash_block(path, block)

    monkeypatch.setattr(module, "_hash_block", cut)
    with pytest.raises(CheckpointChanged, match="became shorter while it was read"):
        digest_of(files)


def test_hashing_runs_beside_the_caller(tmp_path, monkeypatch):
    files = write_files(tmp_path / "m")
    gate, hash_block = threading.Event(), module._hash_block

    def wait(path, block):
        assert gate.wait(60)
        return hash_block(path, block)

    monkeypatch.setattr(module, "_hash_block", wait)
    digest = WeightsDigest(files)
    digest.start()
    gate.set()
    found = digest.result()
    assert found == digest.result() == digest_of(files)


class Together(Peers):
    """A thread that simulates one process of a pod."""

    def __init__(self, rank: int, size: int, values: list, barrier: threading.Barrier):
        self.rank, self.size = rank, size
        self._values, self._barrier = values, barrier

    def gather(self, value):
        # like the store of a pod
        self._values[self.rank] = json.dumps(value)
        self._barrier.wait(60)
        found = [json.loads(text) for text in self._values]
        self._barrier.wait(60)
        return found

    def agree(self, facts):
        first, *others = self.gather(facts())
        if any(other != first for other in others):
            raise ValueError("expected the same on all processes")


def digests_of_pod(files: list[dict[str, Path]]) -> list[str]:
    values, barrier = [None] * len(files), threading.Barrier(len(files))

    def run(rank: int) -> str:
        return WeightsDigest(files[rank], Together(rank, len(files), values, barrier)).result()

    with ThreadPoolExecutor(len(files)) as pool:
        return list(pool.map(run, range(len(files))))


def test_processes_that_share_files_hash_each_block_once_together(tmp_path, hashed):
    files = write_files(tmp_path / "m")
    alone = digest_of(files)
    hashed.clear()
    assert digests_of_pod([files] * 3) == [alone] * 3
    assert sorted(hashed) == sorted(set(hashed)) and len(hashed) == 12


def test_each_process_of_a_pod_hashes_its_share(tmp_path, monkeypatch):
    files = write_files(tmp_path / "m")
    shares, hashing = [], module._Hashing

    def share(paths, blocks):
        shares.append(len(blocks))
        return hashing(paths, blocks)

    monkeypatch.setattr(module, "_Hashing", share)
    digests_of_pod([files] * 2)
    assert shares == [6, 6]


def test_processes_with_copies_of_their_own_hash_all_of_these(tmp_path, hashed):
    files = [write_files(tmp_path / "m"), write_files(tmp_path / "copy")]
    alone = digest_of(files[0])
    hashed.clear()
    assert digests_of_pod(files) == [alone] * 2
    assert len(hashed) == 24


def test_a_copy_that_differs_is_refused_by_the_pod(tmp_path):
    files = [write_files(tmp_path / "m"), write_files(tmp_path / "copy")]
    flip(files[1]["b"], 2500)
    with pytest.raises(ValueError, match="expected the same on all processes"):
        digests_of_pod(files)


def test_a_pod_takes_what_one_of_its_processes_remembers(tmp_path, settled, hashed, monkeypatch):
    files = write_files(tmp_path / "m")
    alone = digest_of(files)
    hashed.clear()
    get, lock = HashRootCache.get, threading.Lock()
    asked: list[int] = []

    def first_alone(self, file):
        with lock:
            asked.append(threading.get_ident())
            return get(self, file) if threading.get_ident() == asked[0] else None

    monkeypatch.setattr(HashRootCache, "get", first_alone)
    assert digests_of_pod([files] * 2) == [alone] * 2
    assert not hashed


@pytest.mark.parametrize(
    "text", ["", "sha256:", "a" * 64, f"sha256:{'A' * 64}", f"sha256:{'a' * 63}"]
)
def test_a_digest_that_is_none_is_refused_with_the_command_that_prints_one(text):
    with pytest.raises(
        ArgumentTypeError, match=r"expected sha256: and 64 .*inspect MODEL --weights-digest"
    ):
        weights_digest(text)
