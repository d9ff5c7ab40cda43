"""Output lengths of finished jobs: known for their own rows, and learned for the rows of others."""

import json
import random
from pathlib import Path

import pytest
from model_on_disk import write_model

from noria.compile.grids.bucket_grid import BucketGrid
from noria.runtime.checkpoint import open_model
from noria.runtime.errors import JobError
from noria.runtime.files.disk import digest_file
from noria.runtime.planning.finished_lengths import (
    AnsweredRow,
    LengthForecast,
    read_finished_job,
)
from noria.runtime.planning.search import simulate_in_order
from noria.runtime.planning.workload import read_workload
from noria.runtime.rows.part import Part

LIMIT = 90
GRID = BucketGrid(168, ((32, 4), (96, 2)), 8)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "m"
    write_model(folder, tokenizer=False)
    with open_model(str(folder), needs_weights=False) as opened:
        yield opened


def true_length(prompt_length: int, rng: random.Random) -> int:
    """The output length in these jobs: short prompts have long answers, and conversely."""
    return max(1, min(LIMIT, 82 - prompt_length + rng.randint(-4, 4)))


def write_job(folder: Path, name: str, seed: int, rows: int = 300, part: str = "part 0 of 1"):
    """Write the input of a job, and its output with what is read of a manifest."""
    rng = random.Random(seed)
    prompts = [rng.randint(1, 76) for _ in range(rows)]
    lengths = [true_length(prompt, rng) for prompt in prompts]
    source, output = folder / f"{name}.jsonl", folder / f"{name}-out.jsonl"
    lines = [
        {"id": f"r{i}", "prompt": [5 + i % 90] * prompt, "max_tokens": LIMIT}
        for i, prompt in enumerate(prompts)
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    answered = [
        {
            "custom_id": f"r{i}",
            "response": {
                "status_code": 200,
                "body": {
                    "choices": [{"text": "", "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": prompts[i], "completion_tokens": lengths[i]},
                },
            },
            "error": None,
        }
        for i in Part.from_manifest(part).take(range(rows))
    ]
    output.write_text("".join(json.dumps(line) + "\n" for line in answered))
    manifest = {
        "configuration": {"rows": part},
        "plan": "schema = 3",
        "input": {"name": source.name, "sha256": digest_file(source).sha256},
        "outputs": {output.name: {"sha256": digest_file(output).sha256}},
    }
    manifest_path = output.with_name(f"{output.name}.manifest.json")
    manifest_path.write_text(json.dumps(manifest))
    return source, output, lengths


def emitted(workload) -> list[int]:
    return [row.output for row in workload.rows]


def decode_steps(workload) -> int:
    return simulate_in_order(workload.rows, GRID, None).metrics.decode.steps


def test_lengths_learned_from_another_job_are_nearer_than_any_share_of_the_limit(files, tmp_path):
    _, output, _ = write_job(tmp_path, "before", seed=1)
    source, own, truth = write_job(tmp_path, "now", seed=2)
    learned = read_workload(source, files, output=output)
    assert learned.manifest is None and "300 answered rows in 12 bins" in learned.length_source

    def errors(workload) -> int:
        return sum(abs(a - b) for a, b in zip(emitted(workload), truth, strict=True))

    shares = [read_workload(source, files, share_of_limit=0.1 * i) for i in range(1, 11)]
    assert errors(learned) < 0.3 * min(map(errors, shares))
    exact = decode_steps(read_workload(source, files, output=own))
    best = min(abs(decode_steps(workload) - exact) for workload in shares)
    assert abs(decode_steps(learned) - exact) <= min(best, 0.02 * exact)
    # the sum, and the longest answers, are those of the job that was learned from
    assert abs(learned.output_tokens - sum(truth)) < 0.05 * sum(truth)
    assert abs(max(emitted(learned)) - max(truth)) <= 4


def test_rows_of_the_same_job_have_their_own_lengths(files, tmp_path):
    source, output, truth = write_job(tmp_path, "job", seed=3, rows=40)
    workload = read_workload(source, files, output=output)
    assert emitted(workload) == truth and workload.manifest is not None
    assert not workload.length_source


def test_a_part_of_the_job_shows_the_lengths_of_all_rows(files, tmp_path):
    source, output, truth = write_job(tmp_path, "job", seed=4, part="part 1 of 3")
    workload = read_workload(source, files, output=output)
    assert "100 answered rows" in workload.length_source and len(workload.rows) == 300
    assert abs(workload.output_tokens - sum(truth)) < 0.05 * sum(truth)


def test_a_stage_of_a_part_has_answered_all_rows_of_its_input(files, tmp_path):
    _, output, _ = write_job(tmp_path, "stage", seed=2)
    path = output.with_name(f"{output.name}.manifest.json")
    manifest = json.loads(path.read_text())
    sha256 = manifest["input"]["sha256"]
    assert read_finished_job(output).answered(sha256)
    manifest["configuration"] = {"rows": "part 0 of 2"}
    path.write_text(json.dumps(manifest))
    assert not read_finished_job(output).answered(sha256)
    manifest["configuration"] |= {"stage": "draft"}
    path.write_text(json.dumps(manifest))
    assert read_finished_job(output).answered(sha256)


def test_without_a_finished_job_rows_emit_a_share_of_their_limit(files, tmp_path):
    source, _, _ = write_job(tmp_path, "job", seed=5, rows=9)
    assert emitted(read_workload(source, files)) == [LIMIT] * 9
    assert emitted(read_workload(source, files, share_of_limit=0.5)) == [LIMIT // 2] * 9


def test_an_output_that_changed_or_has_stages_or_no_answers_is_refused(files, tmp_path):
    source, output, _ = write_job(tmp_path, "job", seed=6, rows=5)
    manifest_path = output.with_name(f"{output.name}.manifest.json")
    manifest = json.loads(manifest_path.read_text())

    def refusal() -> str:
        with pytest.raises(JobError) as caught:
            read_workload(source, files, output=output)
        return str(caught.value)

    manifest["configuration"]["pipeline"] = "{}"
    manifest_path.write_text(json.dumps(manifest | {"stages": []}))
    assert "has stages" in refusal()
    manifest_path.write_text(json.dumps(manifest | {"plan": None}))
    assert "with at least one row of answered tokens" in refusal()
    # a job whose rows asked for vectors
    body = {"object": "list", "data": [], "usage": {"prompt_tokens": 1, "total_tokens": 1}}
    line = {"custom_id": "r0", "response": {"status_code": 200, "body": body}, "error": None}
    output.write_text(json.dumps(line) + "\n")
    outputs = {output.name: {"sha256": digest_file(output).sha256}}
    manifest_path.write_text(json.dumps(manifest | {"outputs": outputs}))
    assert "with at least one row of answered tokens" in refusal()
    output.write_text(output.read_text() + "\n")
    assert "got another content" in refusal()
    manifest_path.unlink()
    assert "no manifest" in refusal()


def answered(prompt_length: int, output: int, *, is_chat: bool = False) -> AnsweredRow:
    return AnsweredRow(is_chat, prompt_length, output, False)


def test_endpoints_have_bins_of_their_own_and_few_rows_are_one_bin():
    rows = [answered(10, 3), answered(90, 5), *[answered(10, 50, is_chat=True)] * 2]
    forecast = LengthForecast.learn([*rows, answered(10, 0)])
    taken = [forecast.next_row(is_chat=False, prompt_length=10) for _ in range(8)]
    outputs = [row.output for row in taken if row]
    assert set(outputs) == {3, 5} and 3 <= outputs.count(3) <= 5
    chat = forecast.next_row(is_chat=True, prompt_length=500)
    assert chat is not None and chat.output == 50
    only_chat = LengthForecast.learn(rows[2:])
    other = only_chat.next_row(is_chat=False, prompt_length=1)
    assert other is not None and other.output == 50
    assert LengthForecast.learn([]).next_row(is_chat=True, prompt_length=1) is None


def test_rows_of_a_bin_take_its_whole_distribution():
    forecast = LengthForecast.learn([answered(10, output) for output in range(1, 101)])
    outputs = [forecast.next_row(is_chat=False, prompt_length=10).output for _ in range(200)]
    assert max(outputs) >= 99 and min(outputs) <= 2
    assert abs(sum(outputs) / 200 - 50.5) < 1
    equal = LengthForecast.learn([answered(7, 1)] * 100)
    assert str(equal) == "100 answered rows in 1 bin"


def test_a_plan_has_the_forms_of_rows_that_the_finished_job_did_not_answer(tmp_path):
    source, output, _ = write_job(tmp_path, "job", seed=6, rows=2)
    first, second = map(json.loads, source.read_text().splitlines())
    second |= {"prompt": "a", "guided_choice": ["yes", "no"]}
    source.write_text(f"{json.dumps(first)}\n{json.dumps(second)}\n")
    output.write_text(output.read_text().splitlines()[0] + "\n")
    manifest_path = output.with_name(f"{output.name}.manifest.json")
    manifest = json.loads(manifest_path.read_text())
    manifest["input"]["sha256"] = digest_file(source).sha256
    manifest["outputs"][output.name]["sha256"] = digest_file(output).sha256
    manifest_path.write_text(json.dumps(manifest))
    write_model(tmp_path / "m")
    with open_model(str(tmp_path / "m"), needs_weights=False) as files:
        workload = read_workload(source, files, output=output)
    assert workload.manifest is not None and len(workload.rows) == 1
    assert workload.structured is not None and len(workload.structured.schemas) == 1
