"""Bundles: executables load without a compiler, and changed bundles are refused."""

import hashlib
import json
import os
import shutil
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from alike import changed
from tiny import GRID
from tiny import TWO_LAYERS as CONFIG

from noria.compile.compiled_graphs import CompiledGraphs
from noria.compile.graphs.graph_kinds import EMPTY_STATE, GraphKey, graph_keys
from noria.compile.monitor import compile_monitor
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.compile.plan_evidence import PlanEvidence
from noria.compile.targets import Target
from noria.modelzoo.rope_config import RopeConfig
from noria.runtime.bundles.bundle import CONTENTS, GRAPHS, Bundle, check_folder, write
from noria.runtime.bundles.executable_cache import LoadError, digests, load_in_background
from noria.runtime.bundles.key import key_of
from noria.runtime.bundles.warm_start import Stores, WarmStart
from noria.runtime.engine.padding import decode_pages, pack_greedy
from noria.runtime.errors import BundleRequired, BundleUnusable, ConfigError

PLAN = Plan("cpu", PlannedModel("tiny", ""), Numbers("float32"), GRID)
ELSEWHERE = Path("/nonexistent/model")


@pytest.fixture(scope="module")
def written(model, target, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("written") / "bundle"
    seconds = dict.fromkeys(model.graphs.executables, 0.5)
    write(path, PLAN, target, CONFIG, model.graphs, seconds)
    return path


@pytest.fixture
def folder(written, tmp_path) -> Path:
    """A copy of a bundle for one test."""
    return shutil.copytree(written, tmp_path / "bundle")


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


def opened(folder: Path, target: Target) -> dict[GraphKey, Future]:
    """Load the executables of a bundle in the background."""
    bundle = Bundle.open(folder, PLAN, target, CONFIG, ELSEWHERE)
    return load_in_background(bundle.dumped, target)


def test_what_is_loaded_computes_the_same_bits_and_nothing_is_compiled(model, target, folder):
    before = compile_monitor().num_compiles
    loading = opened(folder, target)
    assert set(loading) == set(model.graphs.executables)
    loaded = CompiledGraphs(GRID, {key: one.result() for key, one in loading.items()})
    bucket = GRID.prefill[1]
    rows = [list(range(3, 10)), list(range(3, 3 + bucket.length))]
    arguments = pack_greedy(rows, 0, bucket, GRID, CONFIG.vocab_size)
    key = GraphKey("prefill", bucket)
    made = [
        graphs.call(key, model.parameters, graphs.empty_state(), *arguments)
        for graphs in (model.graphs, loaded)
    ]
    for ours, theirs in zip(*map(jax.tree.leaves, made), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    live_B = np.zeros(GRID.decode_slots, bool)
    key = GraphKey("decode")
    loaded.call(key, model.parameters, loaded.empty_state(), live_B, decode_pages(GRID))
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
    assert digests(other, target, CONFIG) == digests(PLAN, target, CONFIG)


def test_a_plan_that_differs_where_no_program_reads_it_has_all_executables(folder, target):
    other = replace(PLAN, max_length_reason="to save memory")
    bundle = Bundle.open(folder, other, target, CONFIG, ELSEWHERE)
    assert bundle.dumped.keys() == set(graph_keys(GRID)) and not bundle.refusal


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"buckets": replace(GRID, steps_per_call=5)}, "buckets.steps_per_call: then 4, now 5"),
        ({"compiler": {"decode": {"xla_a": 1}}}, "compiler.decode.xla_a: then nothing, now 1"),
    ],
)
def test_a_plan_that_differs_has_the_executables_that_do_not_read_it(folder, target, change, named):
    bundle = Bundle.open(folder, replace(PLAN, **change), target, CONFIG, ELSEWHERE)
    lost = {key for key in graph_keys(GRID) if key.kind == "decode"}
    assert bundle.dumped.keys() == set(graph_keys(GRID)) - lost
    assert all(str(key) in bundle.refusal for key in lost) and f"(plan {named})" in bundle.refusal


def test_graphs_that_a_bundle_lacks_come_from_the_cache_or_are_compiled(
    model, folder, target, tmp_path
):
    other = replace(PLAN, compiler={"score": {"xla_a": 1}})
    files = SimpleNamespace(spec=SimpleNamespace(config=CONFIG), path=ELSEWHERE)
    (cache := tmp_path / "cache").mkdir()
    first, *others = (GraphKey("score", bucket) for bucket in GRID.prefill)
    WarmStart(Stores(None, cache), other, target, files, pytest.fail).keep(
        first, model.graphs.executables[first]
    )
    warm = WarmStart(Stores(folder, cache), other, target, files, (notes := []).append)
    assert warm.executables().keys() == set(graph_keys(GRID)) - set(others)
    assert warm.bundle is not None
    assert warm.bundle.executables == len(graph_keys(GRID)) - len(GRID.prefill)
    assert "it has no score 48x1, score 16x2" in (warm.bundle.reason or "")
    assert notes[-1] == "compile cache: 1 executable taken"
    with pytest.raises(BundleRequired, match=r"compiler\.score\.xla_a"):
        WarmStart(Stores(folder, cache, True), other, target, files, notes.append)


def test_a_truncated_or_changed_executable_is_refused(folder, target):
    path = next((folder / GRAPHS).iterdir())
    content = path.read_bytes()
    path.write_bytes(content[:-10])
    assert "differs from the file that was written" in refusal(folder, target)
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "differs from the file that was written" in refusal(folder, target)
    path.unlink()
    assert "No such file" in refusal(folder, target)


def break_an_executable(folder: Path) -> GraphKey:
    """Replace an executable by other bytes, with the correct digest of those bytes."""
    broken, content = GraphKey("decode"), b"\0"
    graphs = json.loads((folder / CONTENTS).read_text())["graphs"]
    (folder / GRAPHS / graphs[str(broken)]["file"]).write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    edit_contents(folder, lambda contents: contents["graphs"][str(broken)].update(sha256=digest))
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
    warm = WarmStart(Stores(folder), PLAN, target, files, notes.append)
    assert warm.executables().keys() == set(graph_keys(GRID)) - broken
    *refusals, note = notes
    assert note.endswith(f"{len(set(graph_keys(GRID)) - broken)} executables taken")
    for key, refusal in zip(broken, refusals, strict=True):
        assert (
            f"executable {key} cannot be loaded" in refusal and "It is compiled instead" in refusal
        )
    assert jax.tree.structure(warm.state()) == jax.tree.structure(warm.executables()[EMPTY_STATE]())


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
    other = changed(CONFIG, rope=RopeConfig(theta=500_000.0))
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
