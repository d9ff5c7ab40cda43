"""Executables in the user's cache: found by all their inputs, and complete or absent."""

import os
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from alike import changed
from tiny import CHUNK_GRID, GRID
from tiny import TWO_LAYERS as CONFIG

from noria.compile.graphs.graph_kinds import FORK, GraphKey, graph_keys
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.modelzoo.rope_config import RopeConfig
from noria.runtime.bundles.compilation_cache import remove_oldest
from noria.runtime.bundles.executable_cache import ExecutableCache, digests
from noria.runtime.bundles.warm_start import Stores, WarmStart
from noria.runtime.engine.padding import decode_pages

PLAN = Plan("cpu", PlannedModel("tiny", ""), Numbers("float32"), GRID)
DECODE = {GraphKey("decode")}


def start(folder, target, notes=None, plan=PLAN) -> WarmStart:
    files = SimpleNamespace(spec=SimpleNamespace(config=CONFIG), path=None)
    say = pytest.fail if notes is None else notes.append
    return WarmStart(Stores(cache=folder), plan, target, files, say)


@pytest.fixture
def folder(model, target, tmp_path):
    """A folder with all executables that a job with an empty cache keeps."""
    warm = start(tmp_path, target)
    for key, executable in model.graphs.executables.items():
        warm.keep(key, executable)
    return tmp_path


def test_the_next_start_takes_every_graph_and_computes_the_same_bits(model, target, folder):
    warm = start(folder, target, notes := [])
    executables = warm.executables()
    assert executables.keys() == set(graph_keys(GRID))
    assert notes == [f"compile cache: {len(executables)} executables taken"]
    arguments = np.zeros(GRID.decode_slots, bool), decode_pages(GRID)
    (key,) = DECODE
    ours = executables[key](model.parameters, warm.state(), *arguments)
    theirs = model.graphs.executables[key](model.parameters, model.graphs.empty_state(), *arguments)
    for one, other in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_empty_cache_has_nothing_ready(target, tmp_path):
    warm = start(tmp_path, target)
    assert not warm.executables() and warm.state() is None


@pytest.mark.parametrize(
    "damage",
    [lambda content: b"", lambda content: content[:-9], lambda content: content[:-1] + b"x"],
    ids=["empty", "cut", "a byte"],
)
def test_a_damaged_file_is_named_and_its_graph_compiled_again(target, folder, damage):
    path = folder / f"{digests(PLAN, target, CONFIG)[FORK]}.bin"
    path.write_bytes(damage(path.read_bytes()))
    executables = start(folder, target, notes := []).executables()
    assert executables.keys() == set(graph_keys(GRID)) - {FORK}
    assert "fork" in notes[0] and "damaged" in notes[0]


def test_a_folder_that_is_gone_costs_a_note_and_no_job(model, target, tmp_path):
    kept = ExecutableCache(tmp_path / "gone", PLAN, target, CONFIG, (notes := []).append)
    (tmp_path / "gone").rmdir()
    assert kept.read() == {} and not notes
    kept.keep(FORK, model.graphs.executables[FORK])
    (note,) = notes
    assert note.startswith("compile cache, fork: not kept")


def test_the_model_and_flags_are_part_of_every_key(target, monkeypatch):
    before = set(digests(PLAN, target, CONFIG).values())
    other = changed(CONFIG, rope=RopeConfig(theta=500_000.0))
    assert not before & set(digests(PLAN, target, other).values())
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert not before & set(digests(PLAN, target, CONFIG).values())


def test_a_key_that_no_program_reads_keeps_all_executables(target):
    plan = replace(PLAN, buckets=CHUNK_GRID)
    other = replace(plan, buckets=replace(CHUNK_GRID, chunks_per_decode=7), max_length_reason="x")
    assert digests(other, target, CONFIG) == digests(plan, target, CONFIG)


def test_a_key_that_programs_read_throws_away_those_alone(target):
    other = replace(PLAN, buckets=replace(GRID, steps_per_call=5))
    before, after = (digests(plan, target, CONFIG) for plan in (PLAN, other))
    assert {key for key in before if before[key] != after[key]} == DECODE


def test_plans_with_other_prefill_buckets_share_their_other_graphs(target):
    fewer = replace(PLAN, buckets=replace(GRID, prefill=GRID.prefill[-1:]))
    named = replace(fewer, model=PlannedModel("elsewhere", "sha256:0"))
    before, after = (digests(plan, target, CONFIG) for plan in (PLAN, named))
    assert after.items() <= before.items()
    assert DECODE <= after.keys() < before.keys()


def test_files_that_were_used_longest_ago_are_removed(tmp_path):
    for number in range(4):
        path = tmp_path / f"{number}.bin"
        path.write_bytes(b"x" * 100)
        os.utime(path, (number, number))
    remove_oldest(tmp_path, max_bytes=250)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2.bin", "3.bin"]
