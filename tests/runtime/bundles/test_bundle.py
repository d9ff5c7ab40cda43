"""Bundles: executables load without a compiler, and changed bundles are refused."""

import hashlib
import json
import os
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from tiny import CONFIG, GRID

from noria.compile.compiled_graphs import CompiledGraphs, graph_names
from noria.compile.monitor import compile_monitor
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.compile.plan_evidence import PlanEvidence
from noria.compile.targets import Target
from noria.modelzoo.rope_config import RopeConfig
from noria.runtime.bundles.bundle import CONTENTS, GRAPHS, Bundle, check_folder, write
from noria.runtime.bundles.executable_cache import graph_keys
from noria.runtime.bundles.key import key_of
from noria.runtime.bundles.loading import LoadError, load_in_background
from noria.runtime.bundles.warm_start import WarmStart
from noria.runtime.engine.padding import pack_greedy
from noria.runtime.errors import BundleUnusable, ConfigError

PLAN = Plan("cpu", PlannedModel("tiny", ""), Numbers("float32"), GRID)
ELSEWHERE = Path("/nonexistent/model")


@pytest.fixture
def folder(model, target, tmp_path) -> Path:
    path = tmp_path / "bundle"
    seconds = dict.fromkeys(model.graphs.executables, 0.5)
    write(path, PLAN, target, CONFIG, model.graphs, seconds)
    return path


def edit_contents(folder: Path, change) -> None:
    path = folder / CONTENTS
    contents = json.loads(path.read_text())
    change(contents)
    path.write_text(json.dumps(contents))


def refusal(
    folder: Path, target: Target, plan: Plan = PLAN, model=CONFIG, model_path: Path = ELSEWHERE
) -> str:
    with pytest.raises(BundleUnusable) as error:
        Bundle.open(folder, plan, target, model, model_path)
    return str(error.value)


def opened(folder: Path, target: Target) -> dict[str, Future]:
    """Load the executables of a bundle in the background."""
    bundle = Bundle.open(folder, PLAN, target, CONFIG, ELSEWHERE)
    return load_in_background(bundle.dumped, target)


def test_what_is_loaded_computes_the_same_bits_and_nothing_is_compiled(model, target, folder):
    before = compile_monitor().num_compiles
    loading = opened(folder, target)
    assert set(loading) == set(model.graphs.executables)
    loaded = CompiledGraphs(GRID, {name: one.result() for name, one in loading.items()})
    bucket = GRID.prefill[1]
    rows = [list(range(3, 10)), list(range(3, 3 + bucket.length))]
    arguments = pack_greedy(rows, 0, bucket, GRID, CONFIG.vocab_size)
    made = [
        graphs.prefill(model.parameters, graphs.empty_state(), bucket, *arguments)
        for graphs in (model.graphs, loaded)
    ]
    for ours, theirs in zip(*map(jax.tree.leaves, made), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    live_B = np.zeros(GRID.decode_slots, bool)
    loaded.decode(model.parameters, loaded.empty_state(), live_B, GRID.decode_spans[0])
    assert compile_monitor().num_compiles == before


def test_a_bundle_says_what_each_graph_took_and_needs(folder):
    graphs = json.loads((folder / CONTENTS).read_text())["graphs"]
    for graph in graphs.values():
        assert graph["compile_seconds"] == 0.5
        assert graph["output_bytes"] > 0


@pytest.mark.parametrize(
    "name",
    [
        "version of jax",
        "compiler",
        "XLA_FLAGS",
        "sources",
        "processor",
        "process",
        "settings of jax",
    ],
)
def test_executables_of_another_build_are_refused_by_what_differs(folder, target, name):
    assert name in key_of(PLAN, target, CONFIG)
    edit_contents(folder, lambda contents: contents["key"].update({name: "other"}))
    assert f"{name}: then other, now" in refusal(folder, target)


def test_flags_of_this_process_count(folder, target, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert "XLA_FLAGS" in refusal(folder, target)


def test_another_plan_is_refused_by_the_keys_that_differ(folder, target):
    other = Plan("cpu", PlannedModel("tiny", ""), Numbers("bfloat16"), GRID)
    said = refusal(folder, target, other)
    assert "(plan numbers.dtype: then float32, now bfloat16)" in said


def test_the_evidence_of_a_plan_is_part_of_no_key(target):
    """It changes no program."""
    other = replace(PLAN, evidence=PlanEvidence("published peaks", 1.0, 2.0, 3.0, 4.0))
    assert key_of(other, target, CONFIG) == key_of(PLAN, target, CONFIG)
    assert graph_keys(other, target, CONFIG) == graph_keys(PLAN, target, CONFIG)


def test_options_of_the_compiler_are_part_of_the_key(folder, target):
    other = replace(PLAN, compiler={"decode": {"xla_backend_optimization_level": 1}})
    assert "plan" in refusal(folder, target, other)


def test_a_truncated_or_changed_executable_is_refused(folder, target):
    path = next((folder / GRAPHS).iterdir())
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    assert "differs from the file that was written" in refusal(folder, target)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "differs from the file that was written" in refusal(folder, target)
    path.unlink()
    assert "No such file" in refusal(folder, target)


def break_an_executable(folder: Path) -> str:
    """Replace an executable by other bytes, with the correct digest of those bytes."""
    broken, content = CompiledGraphs.decode_name(GRID.decode_spans[0]), b"\0"
    graphs = json.loads((folder / CONTENTS).read_text())["graphs"]
    (folder / GRAPHS / graphs[broken]["file"]).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    edit_contents(folder, lambda contents: contents["graphs"][broken].update(sha256=digest))
    return broken


def test_an_executable_that_cannot_be_loaded_is_named(folder, target):
    broken = break_an_executable(folder)
    loading = opened(folder, target)
    with pytest.raises(LoadError, match=f"{broken} cannot be loaded"):
        loading.pop(broken).result()
    assert all(one.result() for one in loading.values())


@pytest.mark.parametrize("is_broken", [False, True])
def test_a_start_has_executables_loaded_and_says_which_are_to_be_compiled(
    folder, target, is_broken
):
    """All executables are loaded before rows run."""
    broken = {break_an_executable(folder)} if is_broken else set()
    notes = []
    files = SimpleNamespace(spec=SimpleNamespace(config=CONFIG), path=ELSEWHERE)
    warm = WarmStart(folder, None, PLAN, target, files, notes.append)
    assert warm.executables().keys() == graph_names(GRID) - broken
    *refusals, note = notes
    assert note.endswith(f"{len(graph_names(GRID) - broken)} executables taken")
    for name, refusal in zip(broken, refusals, strict=True):
        assert (
            f"executable {name} cannot be loaded" in refusal and "It is compiled instead" in refusal
        )
    assert jax.tree.structure(warm.state()) == jax.tree.structure(
        warm.executables()["empty state"]()
    )


def test_what_others_can_write_is_refused(folder, target):
    for path in (folder, folder / GRAPHS, folder / CONTENTS):
        mode = path.stat().st_mode
        path.chmod(mode | 0o020)
        assert "can be written by others" in refusal(folder, target)
        path.chmod(mode)
    Bundle.open(folder, PLAN, target, CONFIG, ELSEWHERE)


def test_what_belongs_to_another_user_is_refused(folder, target, monkeypatch):
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    assert "another user" in refusal(folder, target)


def test_links_are_refused(folder, target):
    path = next((folder / GRAPHS).iterdir())
    moved = folder.parent / "moved"
    path.rename(moved)
    path.symlink_to(moved)
    assert "symbolic links" in refusal(folder, target)


def test_a_link_to_a_bundle_is_no_bundle(folder, target, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder)
    assert "it is a link; give the folder to which it leads" in refusal(link, target)


def test_graphs_of_another_model_of_the_same_shapes_are_refused(folder, target):
    other = replace(CONFIG, rope=RopeConfig(theta=500_000.0))
    assert "model" in refusal(folder, target, model=other)


def test_a_graph_too_few_or_too_many_is_refused(folder, target):
    names = json.loads((folder / CONTENTS).read_text())["graphs"]
    first = next(iter(names))
    edit_contents(folder, lambda contents: contents["graphs"].pop(first))
    assert first in refusal(folder, target)
    edit_contents(folder, lambda contents: contents["graphs"].update({"more": names[first]}))
    assert "more" in refusal(folder, target)


def test_nothing_is_run_from_the_models_directory(folder, target):
    assert "model's directory" in refusal(folder, target, model_path=folder.parent)
    beside = folder.parent / "model.gguf"
    assert "model's directory" in refusal(folder, target, model_path=beside)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"schema": 3}',
        b'{"schema": 3, "executable": true}',
        b'{"schema": 3, "executable": true, "graphs": {"a": {}}, "key": {}}',
        b'{"schema": 3, "executable": true, "graphs": [], "key": {}}',
    ],
)
def test_contents_that_cannot_be_read_are_refused(folder, target, content):
    (folder / CONTENTS).write_bytes(content)
    assert "is malformed" in refusal(folder, target)


def test_an_unfinished_bundle_is_none(folder, target):
    (folder / CONTENTS).unlink()
    assert "No such file" in refusal(folder, target)


def test_a_bundle_replaces_a_bundle_and_nothing_else(model, target, folder, tmp_path):
    seconds = dict.fromkeys(model.graphs.executables, 0.1)
    check_folder(folder, ELSEWHERE)
    write(folder, PLAN, target, CONFIG, model.graphs, seconds)
    Bundle.open(folder, PLAN, target, CONFIG, ELSEWHERE)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(ConfigError, match="other files"):
        check_folder(tmp_path / "mine", ELSEWHERE)
    with pytest.raises(ConfigError, match="model's directory"):
        check_folder(tmp_path / "model" / "bundle", tmp_path / "model" / "x.gguf")
    # the state after a program that was killed while writing
    for name in ("plan.toml", CONTENTS):
        (folder / name).rename(folder / f"{name}.tmp")
    check_folder(folder, ELSEWHERE)
    write(folder, PLAN, target, CONFIG, model.graphs, seconds)
    assert not list(folder.glob("*.tmp"))
