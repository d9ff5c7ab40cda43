"""Jobs that only score: plans without decode slots, derived, planned, with layouts, in bundles."""

import re
import tomllib

import pytest
from command import answer, completion, read_manifest, read_rows, write_lines
from tolerances import FLOAT32_MODEL_LOGPROB

SCORE = {"echo": True, "max_tokens": 0, "logprobs": 2}
LENGTHS = [3, 7, 21, 4, 12, 30, 9, 2]


@pytest.fixture(scope="module")
def source(noria, tmp_path_factory):
    rows = [completion(f"q{i}", list(range(3, 3 + n)), **SCORE) for i, n in enumerate(LENGTHS)]
    return write_lines(tmp_path_factory.mktemp("scoring") / "in.jsonl", rows)


@pytest.fixture(scope="module")
def job(noria, source):
    """The answers, the manifest and the names of the graphs of a job without a plan."""
    output = source.with_name("out.jsonl")
    arguments = ("-i", source, "-o", output, "--model", noria.model)
    said = noria.run("batch", *arguments).stderr
    rows, manifest = read_rows(output), read_manifest(output)
    return [answer(row) for row in rows], manifest, graphs_in(said)


def graphs_in(said: str) -> list[str]:
    return sorted(re.findall(r"^compile \[\d+/\d+\] (.*?)  ", said, re.MULTILINE))


def test_a_job_that_only_scores_has_no_slots_and_no_decode(job):
    _, manifest, graphs = job
    buckets = tomllib.loads(manifest["plan"])["buckets"]
    assert buckets["decode_slots"] == 0 and "pages" not in buckets
    scored = [f"score {length}x{batch}" for length, batch in buckets["prefill"]]
    assert graphs == sorted([*scored, "empty state"])
    assert manifest["rows"]["ok"] == len(LENGTHS)
    assert manifest["generator"]["buckets"]["decode"] == {}
    assert manifest["generator"]["padding"]["idle_slot_tokens"] == 0
    assert manifest["generator"]["phases"]["decode_tokens_per_second"] is None
    assert set(manifest["generator"]["attention"]) == {"prefill"}


def test_scores_are_those_of_a_plan_with_slots(noria, source, job, tmp_path):
    """A given number of slots makes a grid with slots and the same prefill buckets."""
    rows, manifest = noria.batch(source, tmp_path / "out.jsonl", "--set", "buckets.decode_slots=4")
    assert [answer(row) for row in rows] == job[0]
    with_slots, without = (tomllib.loads(m["plan"])["buckets"] for m in (manifest, job[1]))
    assert with_slots["decode_slots"] == 4 and with_slots["pages"]
    assert with_slots["prefill"] == without["prefill"]


def test_a_row_that_wants_tokens_is_an_error_row_of_such_a_plan(noria, job, tmp_path):
    (tmp_path / "plan.toml").write_text(job[1]["plan"])
    rows = [completion("scored", [3, 4, 5], **SCORE), completion("more", [3, 4], max_tokens=2)]
    rows.append(completion("echoed", [3, 4], echo=True, max_tokens=1, logprobs=1))
    source = write_lines(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out.jsonl"
    found, _ = noria.batch(source, output, "--plan", tmp_path / "plan.toml", expect=1)
    assert found[0]["error"] is None
    for row in found[1:]:
        error = row["response"]["body"]["error"]
        assert error["code"] == "invalid_request" and error["param"] == "max_tokens"
        assert "the plan has no decode slots" in error["message"]


def test_a_workload_that_only_scores_is_planned_without_slots_and_runs(
    noria, source, job, tmp_path
):
    plan, report = tmp_path / "plan.toml", tmp_path / "report"
    options = ("--model", noria.model, "--workload", source, "-o", plan, "--report", report)
    said = noria.run_here("plan", *options, "--chunks", "never")
    assert tomllib.loads(plan.read_text())["buckets"]["decode_slots"] == 0
    assert not re.search(r"^decode\b.* \d", said, re.MULTILINE) and "% full" not in said
    bundle, output = tmp_path / "bundle", tmp_path / "out.jsonl"
    said = noria.run("compile", "--model", noria.model, "--plan", plan, "-o", bundle).stdout
    assert re.search(r"\d+ graphs compiled in .* peak memory per device", said)
    arguments = ("-i", source, "-o", output, "--model", noria.model, "--plan", bundle)
    assert "executables taken" in noria.run("batch", *arguments).stderr
    found = [answer(row) for row in read_rows(output)]
    for ((ours,), _), ((expected,), _) in zip(found, job[0], strict=True):
        assert ours["text"] == expected["text"]
        assert ours["logprobs"]["token_logprobs"][1:] == pytest.approx(
            expected["logprobs"]["token_logprobs"][1:], abs=FLOAT32_MODEL_LOGPROB
        )


def test_layouts_of_such_a_workload_are_compiled(noria, source, tmp_path):
    options = ("--model", noria.model, "--workload", source, "-o", tmp_path / "plan.toml")
    layouts = "data-parallel@data=2 weight-stationary-1d@tensor=2"
    said = noria.run(
        "plan", *options, "--target", "cpu:2", "--chunks", "never", "--layout", layouts,
        "--compile-layouts", "2",
    )  # fmt: skip
    assert "score " in said.stderr and "cannot run" not in said.stdout
    assert tomllib.loads((tmp_path / "plan.toml").read_text())["buckets"]["decode_slots"] == 0


def test_such_a_job_runs_under_a_layout(noria, source, job, tmp_path):
    layout = ("--target", "cpu:4", "--layout", "data-tensor@data=2,tensor=2")
    rows, manifest = noria.batch(source, tmp_path / "out.jsonl", *layout)
    assert tomllib.loads(manifest["plan"])["buckets"]["decode_slots"] == 0
    for row, expected in zip(rows, job[0], strict=True):
        ours, theirs = (choices[0]["logprobs"] for choices, _ in (answer(row), expected))
        assert ours["token_logprobs"][1:] == pytest.approx(theirs["token_logprobs"][1:], abs=1e-4)


def test_scored_rows_that_begin_alike_compute_it_once_with_the_same_bytes(noria, tmp_path):
    header = [3 + i % 200 for i in range(70)]
    rows = [
        completion(f"q{i}", [*header[: 70 - 16 * (i % 3)], 9 + i, *range(5, 5 + i % 7)], **SCORE)
        for i in range(24)
    ]
    # a row that is not scored shares nothing with those that are
    rows.append(completion("more", [*header, 9, 8], max_tokens=3))
    source = write_lines(tmp_path / "in.jsonl", rows)
    in_chunks = ("--set", "buckets.chunk=16")
    shared, manifest = noria.batch(source, tmp_path / "shared.jsonl", *in_chunks)
    options = (*in_chunks, "--no-sharing")
    whole, without = noria.batch(source, tmp_path / "whole.jsonl", *options)
    assert [answer(row) for row in shared] == [answer(row) for row in whole]
    assert manifest["generator"]["shared_prefixes"]["saved_tokens"] > 800
    assert without["generator"]["shared_prefixes"]["saved_tokens"] == 0
