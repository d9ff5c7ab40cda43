"""Jobs with stages through the command: one build for all stages, kills, parts and refusals."""

import json
import random
import re
import signal
import time

import pytest
from command import num_records, read_manifest, read_rows, write_lines

STAGES = """
[[stages]]
name = "draft"
n = 2
temperature = 0.9
max_tokens = 10
logit_bias = { "67" = 6, "68" = 6, "69" = 6, "70" = 6 }
messages = [{ role = "user", content = "{{ row.question }}" }]

[[stages]]
name = "again"
temperature = 0.9
max_tokens = 10
logit_bias = { "67" = 6, "68" = 6, "69" = 6, "70" = 6 }
messages = [{ role = "user", content = "{{ row.question }}" }]

[[stages]]
name = "revise"
temperature = 0
max_tokens = 12
prompt = "{{ row.question }}{% for a in draft.answers %} {{ a }}{% endfor %} {{ again.answer }}"
"""
DTYPE = ("--dtype", "float32")
WORDS = ["the", "water", "wheel", "turns", "buckets", "of", "fixed", "size"]


@pytest.fixture(scope="module")
def job(noria, tmp_path_factory):
    """An input, a pipeline, and the undisturbed output with the files of its stages."""
    folder = tmp_path_factory.mktemp("pipeline")
    rng = random.Random(7)
    rows = [
        {"id": f"row-{i}", "question": " ".join(rng.choices(WORDS, k=rng.randint(1, 6)))}
        for i in range(60)
    ]
    rows[7] = {"id": "row-7", "text": "no question"}
    source, pipeline = write_lines(folder / "in.jsonl", rows), folder / "stages.toml"
    pipeline.write_text(STAGES)
    whole = folder / "whole.jsonl"
    options = ("--pipeline", pipeline, *DTYPE)
    noria.batch(source, folder / "first.jsonl", *options, expect=1)
    noria.batch(source, whole, *options, "--keep-stages", expect=1)
    return source, options, whole


def masked(path) -> str:
    return re.sub(r'"created":\d+', '"created":0', path.read_text("utf-8"))


def test_stages_run_on_one_build_and_read_answers(job):
    _, _, whole = job
    rows, manifest = read_rows(whole), read_manifest(whole)
    folder = whole.with_name("whole.jsonl.stages")
    drafts = {row["custom_id"]: row for row in read_rows(folder / "1-draft.jsonl")}
    again = {row["custom_id"]: row for row in read_rows(folder / "2-again.jsonl")}
    asked = {row["custom_id"]: row for row in read_rows(folder / "3-revise.in.jsonl")}
    assert [row["custom_id"] for row in rows] == [f"row-{i}" for i in range(60)]

    def texts(row) -> list[str]:
        return [choice["message"]["content"] for choice in row["response"]["body"]["choices"]]

    for name, row in asked.items():
        (other,) = texts(again[name])
        for text in (*texts(drafts[name]), other):
            assert f" {text}" in row["body"]["prompt"]
    # equal prompts have other samples in another stage
    same = [texts(again[name])[0] in texts(drafts[name]) for name in asked]
    assert sum(same) < len(same) / 4
    codes = [row["response"]["body"].get("error", {}).get("code") for row in rows]
    assert codes[7] == "template_error" and codes.count(None) == manifest["rows"]["ok"] > 50
    assert manifest["compiles_during_run"] == 0
    build = [stage["build_seconds"] for stage in manifest["stages"]]
    assert build[0] > 0.05 > max(build[1:])
    assert [stage["name"] for stage in manifest["stages"]] == ["draft", "again", "revise"]


def test_a_job_killed_in_its_stages_ends_as_if_undisturbed(noria, job, tmp_path):
    source, options, whole = job
    output = tmp_path / "out.jsonl"
    arguments = ("batch", "-i", source, "-o", output, "--model", noria.model, *options)
    folder = tmp_path / "out.jsonl.stages"
    moments = ["1-draft.jsonl.journal", "2-again.in.jsonl", "3-revise.jsonl.journal"]
    for name in moments:
        process = noria.start(*arguments)
        deadline = time.monotonic() + 120
        num_records = 12 * name.endswith("journal")
        while not _has_records(folder / name, num_records):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.002)
        process.kill()
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert not output.exists()
    noria.run(*arguments, expect=1)
    assert masked(output) == masked(whole)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [
        "out.jsonl",
        "out.jsonl.manifest.json",
    ]


def _has_records(path, count: int) -> bool:
    return path.exists() and num_records(path) >= count


def test_parts_have_the_plan_of_the_whole_job_and_merge_to_its_output(noria, job, tmp_path):
    source, options, whole = job
    parts = [tmp_path / f"part{i}.jsonl" for i in range(2)]
    for i, part in enumerate(parts):
        noria.batch(source, part, *options, "--rows", f"{i}/2", expect=1 - (i == 0))
        assert read_manifest(part)["plan"] == read_manifest(whole)["plan"]
    merged = tmp_path / "merged.jsonl"
    noria.run("merge", *parts, "-o", merged, expect=1)
    assert masked(merged) == masked(whole)


def test_what_stages_do_not_go_with_is_refused(noria, job, tmp_path):
    source, (_, pipeline, *_), _ = job
    output = tmp_path / "out.jsonl"
    arguments = ("batch", "-i", source, "-o", output, "--model", noria.model)
    pod = ("--coordinator", "localhost:1", "--num-processes", "2", "--process-id", "0")
    said = noria.refuse(*arguments, "--pipeline", pipeline, *pod)
    assert "--pipeline: expected one process" in said and "--rows i/n" in said
    assert "--keep-stages: expected --pipeline" in noria.refuse(*arguments, "--keep-stages")
    assert "no.toml: cannot be read" in noria.refuse(*arguments, "--pipeline", "no.toml")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(STAGES.replace("again.answer", "later.answer"))
    said = noria.refuse(*arguments, "--pipeline", wrong)
    assert "stage revise: prompt" in said and "got 'later'" in said
    assert not output.exists()
    plan = ("plan", "--model", noria.model, "--workload", source, "-o", tmp_path / "plan.toml")
    assert "has stages" in noria.refuse(*plan, "--from-output", job[2])


def test_a_complete_job_is_recognised(noria, job):
    source, options, whole = job
    before = whole.read_bytes()
    done = noria.run(
        *("batch", "-i", source, "-o", whole, "--model", noria.model, *options, "--keep-stages"),
        expect=1,
    )
    assert "complete already" in done.stderr and whole.read_bytes() == before
    assert json.loads(before.split(b"\n", 1)[0])["custom_id"] == "row-0"
