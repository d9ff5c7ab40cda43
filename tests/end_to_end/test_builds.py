"""Builds that fail: the graph, the rows that need it and the remedy are named, and no row runs."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from command import completion, plan_text, read_manifest, read_rows, write_lines

from noria.compile import build
from noria.runtime import cli, session
from noria.runtime.bundles.executable_cache import ExecutableCache
from noria.runtime.devices import graph_memory
from noria.runtime.engine.generation import GenerationSession

GRID = ["buckets.prefill=[[16, 2], [32, 1]]", "buckets.max_length=48", "buckets.page=16"]


@pytest.fixture
def job(noria, tmp_path):
    """The arguments of a job with short and longer rows."""
    lengths = [4, 20, 5, 25, 6, 30, 21, 22]
    rows = [completion(f"q{i}", [3] * n, max_tokens=4) for i, n in enumerate(lengths)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    overrides = [word for key in GRID for word in ("--set", key)]
    given = ["-i", str(source), "-o", str(tmp_path / "out.jsonl"), "--model", str(noria.model)]
    return ["batch", *given, *overrides]


def fail(monkeypatch, name: str) -> None:
    """One graph fails to compile, and the others take no time."""

    def compile_graph(graph):
        if str(graph.key) == name:
            raise RuntimeError("INTERNAL: injected.\nBuffer assignment:")
        return None, 0.0

    monkeypatch.setattr(build, "compile_graph", compile_graph)
    monkeypatch.setattr(ExecutableCache, "read", lambda self: {})
    monkeypatch.setattr(ExecutableCache, "keep", lambda self, name, executable: None)


def test_a_graph_that_does_not_compile_is_named_with_its_rows(job, monkeypatch, capsys, tmp_path):
    fail(monkeypatch, "prefill 32x1")
    assert cli.main(job) == 4
    (said,) = [line for line in capsys.readouterr().err.splitlines() if "noria: " in line]
    assert said == (
        "noria: graph 'prefill 32x1' does not compile: INTERNAL: injected. Change the bucket 32x1: "
        "spread the model over more devices, or take shorter rows. 5 of 8 rows need it: 'q1' (line "
        "2), 'q3' (line 4), 'q5' (line 6), ...; none has run."
    )
    assert not (tmp_path / "out.jsonl").exists()


def test_a_program_that_compiles_during_the_run_is_named_in_the_manifest_and_the_error(
    job, monkeypatch, capsys, tmp_path
):
    dispatch = GenerationSession.dispatch
    # jax's cache keeps the program, and the monitor its name: other tests must not meet them
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def compile_and_dispatch(session):
        jax.jit(double_rows)(np.ones(3, np.float32))
        return dispatch(session)

    def double_rows(x):
        return 2 * x

    monkeypatch.setattr(GenerationSession, "dispatch", compile_and_dispatch)
    assert cli.main(job) == 4
    named = "jit(double_rows): compiled for the first time, with float32[3]"
    manifest = read_manifest(tmp_path / "out.jsonl")
    assert manifest["compiles_during_run"] == 1
    assert manifest["generator"]["unexpected_compiles"] == [named]
    said = capsys.readouterr().err
    assert f"expected no compile after the build, got 1 ({named}). The output is complete" in said
    assert len(read_rows(tmp_path / "out.jsonl")) == 8


def test_the_remedy_for_a_bucket_is_a_command_that_runs(job, monkeypatch, capsys, tmp_path):
    """Rows do not move to a longer bucket automatically: the plan decides their graphs."""
    fail(monkeypatch, "prefill 16x2")
    assert cli.main(job) == 4
    said = capsys.readouterr().err
    assert "3 of 8 rows need it: 'q0' (line 1), 'q2' (line 3), 'q4' (line 5); none has run." in said
    assert "leave it to the next longer one with --set 'buckets.prefill=[[32, 1]]'" in said
    monkeypatch.undo()
    (tmp_path / "out.jsonl.journal").unlink(missing_ok=True)
    assert cli.main([*job, "--quiet", "--set", "buckets.prefill=[[32, 1]]"]) == 0


def test_weights_that_do_not_fit_end_with_the_code_of_memory(job, monkeypatch, capsys):
    def run_out(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes.\nmore")

    monkeypatch.setattr(session, "load_params", run_out)
    assert cli.main(job) == 4
    said = capsys.readouterr().err
    assert "the weights of model, 0.00 GB in float32, do not fit on cpu: RESOURCE_EXH" in said
    assert "Take dtype bfloat16, more devices with a layout that shards them" in said
    assert "more\n" not in said.partition("noria: ")[2].removesuffix("\n")


def test_weights_beyond_the_memory_of_the_machine_are_not_loaded(job, monkeypatch, capsys):
    monkeypatch.setattr(session, "load_params", pytest.fail)
    monkeypatch.setattr(graph_memory, "host_bytes", lambda: 10**4)
    assert cli.main(job) == 4
    assert "do not fit on cpu: this machine has 0.00 GB of memory" in capsys.readouterr().err


COMMANDS = r"""
import sys
from noria.runtime import cli, LLM
model, source, plan, folder = sys.argv[1:]
sizes = ["--pp", "4", "--tg", "2", "--batch", "1"]
shown = ["--layers", "1", "--layouts", "data-parallel"]
commands = {
    "batch": ["batch", "-i", source, "-o", folder + "/out.jsonl", "--model", model],
    "bench": ["bench", "--model", model, *sizes],
    "compile": ["compile", "--model", model, "--plan", plan, "-o", folder + "/bundle"],
    "layouts": ["layouts", "--model", model, "--target", "cpu:2", "-o", folder + "/l", *shown],
    "plan": ["plan", "--model", model, "--workload", source, "-o", folder + "/p.toml"],
}
for name, command in commands.items():
    print(f"== {name}", file=sys.stderr)
    if name == "plan":
        command += ["--target", "cpu", "--compile-layouts", "1"]
    print(f"== {name} {cli.main(command)}")
try:
    LLM(model, max_model_len=32)
except ValueError as error:
    print(f"== LLM 2\n", error, file=sys.stderr)
"""
PLAN = plan_text(
    """\
max_length = 16
prefill = [[8, 1]]
decode_slots = 1
page = 8
"""
)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({"JAX_ENABLE_X64": "1"}, "JAX_ENABLE_X64: expected off"),
        ({"JAX_PLATFORMS": "cuda"}, "Unset JAX_PLATFORMS, which lets jax start cuda alone"),
    ],
)
def test_settings_of_jax_that_cannot_be_are_refused_by_name(
    noria, job, tmp_path, setting, expected
):
    (tmp_path / "plan.toml").write_text(PLAN)
    given = [noria.model, tmp_path / "in.jsonl", tmp_path / "plan.toml", tmp_path]
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMMANDS, *map(str, given)],
        env=noria.environment | setting,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    names = ["batch", "bench", "compile", "layouts", "plan"]
    assert run.stdout.splitlines() == [f"== {name} 2" for name in names], run.stderr
    for said in run.stderr.split("== ")[1:]:
        assert expected in said and "Traceback" not in said, said
    assert run.stderr.count("== ") == 6


def test_a_home_that_cannot_be_written_costs_a_job_one_line(noria, job, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert cli.main(job) == 0
    said = capsys.readouterr().err
    assert said.count("no compile cache, so every run compiles all graphs") == 1
    assert os.environ["XDG_CACHE_HOME"] == "/dev/null"
