"""Compiler options are part of a plan: they reach the graphs, and wrong ones are refused."""

import tomllib

import pytest
from command import completion, read_manifest, write_lines

from noria.compile import program_cache
from noria.runtime import cli

MODEL = '[model]\nsource = "model"\nfingerprint = ""\n'
NUMBERS = '[numbers]\ndtype = "float32"\n'
BUCKETS = """
[buckets]
max_length = 48
prefill = [[16, 2]]
decode_slots = 2
page = 8
score = true
"""
PLAN = f'schema = 3\ntarget = "cpu"\n{MODEL}{NUMBERS}{BUCKETS}'
UNKNOWN = "compiler.decode.xla_no_such_option"


@pytest.fixture
def source(tmp_path):
    rows = [completion(f"q{i}", [3 + i] * (i + 2), max_tokens=12 + i) for i in range(5)]
    rows.append(completion("scored", [5, 6, 7], echo=True, max_tokens=0, logprobs=1))
    return write_lines(tmp_path / "in.jsonl", rows)


def test_options_reach_the_graphs_of_their_kind_alone(noria, source, tmp_path, monkeypatch):
    compiled = []
    compile_program = program_cache.compile_program

    def compile_and_note(lowered, options, *others):
        compiled.append(dict(options))
        return compile_program(lowered, options, *others)

    monkeypatch.setattr("noria.compile.build.compile_program", compile_and_note)
    # graphs without these options would be taken from the executables that are kept
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "plan.toml").write_text(PLAN)
    given = ["-i", source, "-o", tmp_path / "out.jsonl", "--model", noria.model, "--quiet"]
    level = "xla_backend_optimization_level"
    sets = [f"compiler.decode.{level}=1", f"compiler.score.{level}=2", f"compiler.fork.{level}=3"]
    options = [word for one in sets for word in ("--set", one)]
    arguments = ["batch", *given, "--plan", tmp_path / "plan.toml", *options]
    assert cli.main([*map(str, arguments)]) == 0
    levels = sorted(options.get(level, 0) for options in compiled)
    # prefill and the empty state have none
    assert levels == [0, 0, 1, 2, 3]
    manifest = read_manifest(tmp_path / "out.jsonl")
    assert tomllib.loads(manifest["plan"])["compiler"]["score"] == {level: 2}


@pytest.mark.parametrize("command", ["batch", "compile"])
def test_an_option_that_the_compiler_does_not_know_is_refused(noria, source, tmp_path, command):
    (tmp_path / "plan.toml").write_text(PLAN)
    output, given = tmp_path / "out", ["-i", source] if command == "batch" else []
    said = noria.refuse(
        command, *given, "-o", output, "--model", noria.model,
        "--plan", tmp_path / "plan.toml", "--set", f"{UNKNOWN}=true",
    )  # fmt: skip
    assert f"plan {UNKNOWN}: expected an option and a value that the target's compiler kn" in said
    assert "got True for graph 'decode" in said and "No such compile option" in said
    assert "Correct it, or remove it from the plan." in said


def test_a_value_that_the_option_does_not_take_is_refused(noria, source, tmp_path):
    (tmp_path / "plan.toml").write_text(PLAN)
    said = noria.refuse(
        "batch", "-i", source, "-o", tmp_path / "out", "--model", noria.model, "--plan",
        tmp_path / "plan.toml", "--set", "compiler.fork.xla_backend_optimization_level=fast",
    )  # fmt: skip
    assert "got 'fast' for graph 'fork'" in said and "not a valid int32 value" in said
