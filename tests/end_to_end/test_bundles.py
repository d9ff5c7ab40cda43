"""`noria compile` and jobs that start from what it kept, through the command."""

import json

import pytest
from command import answer, completion, read_rows, write_lines


@pytest.fixture(scope="module")
def source(noria, tmp_path_factory):
    rows = [completion(f"row-{i}", list(range(3, 9 + i)), max_tokens=6) for i in range(12)]
    return write_lines(tmp_path_factory.mktemp("bundles") / "in.jsonl", rows)


@pytest.fixture(scope="module")
def plan(noria, source):
    path = source.with_name("plan.toml")
    options = ("--model", noria.model, "--workload", source, "-o", path, "--quiet")
    noria.run("plan", *options)
    return path


@pytest.fixture(scope="module")
def bundle(noria, source, plan):
    folder = source.with_name("bundle")
    # the second time, what was compiled before lies in the compile cache of jobs
    noria.batch(source, source.with_name("before.jsonl"), "--plan", plan)
    noria.run("compile", "--model", noria.model, "--plan", plan, "-o", folder)
    return folder


def test_a_job_starts_from_a_bundle_without_compiling(noria, source, plan, bundle):
    compiled, _ = noria.batch(source, source.with_name("plain.jsonl"), "--plan", plan)
    output = source.with_name("out.jsonl")
    arguments = ("-i", source, "-o", output, "--model", noria.model, "--plan", bundle)
    said = noria.run("batch", *arguments).stderr
    assert "executables loaded, none compiled" in said
    assert "compile [" not in said
    for ours, theirs in zip(read_rows(output), compiled, strict=True):
        assert answer(ours) == answer(theirs)


def test_an_edited_plan_is_compiled_with_a_word(noria, source, bundle):
    output = source.with_name("edited.jsonl")
    arguments = ("-i", source, "-o", output, "--model", noria.model, "--plan", bundle)
    said = noria.run("batch", *arguments, "--set", "buckets.steps_per_call=4").stderr
    assert "Compiling the plan instead" in said
    assert "compile [1/" in said
    assert all(row["response"]["status_code"] == 200 for row in read_rows(output))


def test_a_folder_without_a_plan_is_refused(noria, source, tmp_path):
    arguments = ("-i", source, "-o", source.with_name("no.jsonl"), "--model", noria.model)
    said = noria.run("batch", *arguments, "--plan", tmp_path, expect=2).stderr
    assert "noria compile" in said


@pytest.mark.tpu_compile
def test_for_a_target_that_is_not_there_the_report_is_kept(noria, source):
    plan, folder = source.with_name("tpu.toml"), source.with_name("tpu")
    options = ("--model", noria.model, "--workload", source, "-o", plan, "--quiet")
    noria.run("plan", *options, "--target", "tpu:v5e:1x1")
    said = noria.run("compile", "--model", noria.model, "--plan", plan, "-o", folder).stdout
    assert "not kept" in said
    contents = json.loads((folder / "bundle.json").read_text("utf-8"))
    assert not contents["executable"]
    assert all(graph["compile_seconds"] > 0 for graph in contents["graphs"].values())
    assert any(graph["temp_bytes"] > 0 for graph in contents["graphs"].values())
