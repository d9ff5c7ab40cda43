"""Jobs whose rows ask for forms: valid answers, error rows, and the same bytes after kills."""

import json
import random
import re

import jsonschema
import pytest
from command import answer, chat, completion, read_rows, write_lines

from noria.runtime import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "b": {"type": "string", "maxLength": 8},
        "a": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}},
    },
    "required": ["b", "a"],
}
TREE = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["a"],
}
SUM = 'root ::= root "+" root | "(" root ")" | [0-9]+'
PATTERN = "[ab]{2,5}[0-9]"
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}
REFUSED = {
    "unsupported": {"guided_json": {"items": {"uniqueItems": True}}},
    "endless": {"guided_json": {"properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
    "too large": {"guided_json": {"type": "string", "maxLength": 100_000}},
    "too short": {"response_format": FORMAT, "max_tokens": 3},
    "grammar": {"guided_grammar": "root ::= word"},
}


def lines() -> list[dict]:
    rng = random.Random(5)
    rows = []
    for i in range(40):
        body = [{"response_format": FORMAT}, {"guided_regex": PATTERN}, {}][i % 3]
        prompt = [rng.randrange(3, 250) for _ in range(rng.randint(1, 30))]
        sampling = {"temperature": 1.5 * (i % 2), "max_tokens": rng.randint(20, 40), "n": 1 + i % 2}
        rows.append(completion(f"row-{i}", prompt, **sampling, **body))
    rows[3] = chat("chat", "the wheel", max_tokens=30, response_format={"type": "json_object"})
    rows[4] = chat("choice", "the wheel", max_tokens=30, guided_choice=["yes", "no"])
    rows[6] = chat("tree", "the wheel", max_tokens=40, guided_json=TREE)
    rows[7] = completion("sum", "1", max_tokens=30, guided_grammar=SUM)
    return rows + [completion(name, "x", **body) for name, body in REFUSED.items()]


@pytest.fixture(scope="module")
def job(noria, tmp_path_factory):
    folder = tmp_path_factory.mktemp("structured")
    source, output = write_lines(folder / "in.jsonl", lines()), folder / "out.jsonl"
    _, manifest = noria.batch(source, output, expect=1)
    return source, output, manifest


def masked(path) -> str:
    return re.sub(r'"created":\d+', '"created":0', path.read_text("utf-8"))


def texts_of(row: dict) -> list[str]:
    choices = row["response"]["body"]["choices"]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    return [c["message"]["content"] if "message" in c else c["text"] for c in choices]


def test_every_row_has_an_answer_of_its_form_or_an_error(job):
    rows = {row["custom_id"]: row for row in read_rows(job[1])}
    validator = jsonschema.Draft202012Validator(SCHEMA)
    for i in range(40):
        if i in (3, 4, 6, 7) or i % 3 == 2:
            continue
        for text in texts_of(rows[f"row-{i}"]):
            if i % 3 == 0:
                assert validator.is_valid(json.loads(text)), text
            else:
                assert re.fullmatch(PATTERN, text), text
    assert isinstance(json.loads(texts_of(rows["chat"])[0]), dict)
    (tree,), (total,) = texts_of(rows["tree"]), texts_of(rows["sum"])
    assert jsonschema.Draft202012Validator(TREE).is_valid(json.loads(tree))
    assert re.fullmatch(r"[0-9+()]+", total) and eval(total) >= 0
    assert texts_of(rows["choice"])[0] in ("yes", "no")
    errors = {name: answer(rows[name]) for name in REFUSED}
    assert "uniqueItems at /items: expected false" in errors["unsupported"]["message"]
    assert "expected a form that some text has" in errors["endless"]["message"]
    assert "grammar: expected a rule of the name word" in errors["grammar"]["message"]
    assert "maxLength at /: expected a smaller language" in errors["too large"]["message"]
    assert "expected room for the shortest answer" in errors["too short"]["message"]
    assert errors["too short"]["param"] == "max_tokens"


def test_the_plan_names_the_forms(job):
    plan = job[2]["plan"]
    forms = [
        StructuredOutputsParams(json=SCHEMA),
        StructuredOutputsParams(regex=PATTERN),
        StructuredOutputsParams(json_object=True),
        StructuredOutputsParams(choice=["yes", "no"]),
        StructuredOutputsParams(json=TREE),
        StructuredOutputsParams(grammar=SUM),
    ]
    assert "[structured]" in plan
    assert set(re.findall("sha256:[0-9a-f]{64}", plan.split("[structured]")[1])) == {
        form.fingerprint for form in forms
    }
    assert job[2]["compiles_during_run"] == 0


def test_a_label_of_one_token_needs_no_more_and_no_stop_cuts_an_answer(noria, tmp_path):
    rows = [
        completion("label", [5, 6, 7], max_tokens=1, guided_choice=["a", "b"]),
        completion("stop", [5, 6, 7], max_tokens=4, guided_choice=["aaa", "baa"], stop=["a"]),
    ]
    source, output = write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl"
    noria.run("batch", "-i", source, "-o", output, "--model", noria.model)
    label, stop = map(texts_of, read_rows(output))
    assert label[0] in ("a", "b") and stop[0] in ("aaa", "baa")


def test_rows_without_room_for_their_form_count_for_nothing(noria, tmp_path):
    """One row is refused when it is admitted, and no plan counts it."""
    form = {"guided_choice": ["aaaaaaaaaaaaaaaaaaaaaaaa"]}
    rows = [completion(f"r{i}", [5] * 32 + [i] * 8, max_tokens=30, **form) for i in range(6, 9)]
    rows[2]["body"]["max_tokens"] = 1
    source = write_lines(tmp_path / "in.jsonl", rows)
    arguments = ("-i", source, "-o", tmp_path / "out.jsonl", "--model", noria.model)
    said = noria.run("batch", *arguments, "--set", "buckets.chunk=16", expect=1).stderr
    assert "prompts that begin alike: 32 of 80 tokens can be copied" in said
    assert (
        "expected room for the shortest" in answer(read_rows(tmp_path / "out.jsonl")[2])["message"]
    )
    arguments = ("--workload", source, "--target", "cpu", "--tries", 1, "-o", tmp_path / "p.toml")
    said = noria.run("plan", "--model", noria.model, *arguments)
    assert "2 rows to plan for, 1 refused" in said.stderr


def test_a_planned_job_has_the_same_forms(noria, job, tmp_path):
    path = tmp_path / "plan.toml"
    arguments = ("--workload", job[0], "--target", "cpu", "--tries", 1, "-o", path)
    noria.run_here("plan", "--model", noria.model, *arguments)
    of_job = job[2]["plan"].partition("[structured]")[2]
    assert path.read_text("utf-8").partition("[structured]")[2] == of_job


def test_rows_without_a_form_have_the_answers_of_a_job_without_forms(noria, job, tmp_path):
    rows = [row for i, row in enumerate(lines()[:40]) if i % 3 == 2 and i not in (3, 4)]
    plan = job[2]["plan"].split("[structured]")[0]
    (tmp_path / "plan.toml").write_text(plan)
    source = write_lines(tmp_path / "in.jsonl", rows)
    free, _ = noria.batch(source, tmp_path / "out.jsonl", "--plan", tmp_path / "plan.toml")
    expected = {row["custom_id"]: answer(row) for row in read_rows(job[1])}
    assert [answer(row) for row in free] == [expected[row["custom_id"]] for row in free]


def test_a_killed_job_ends_as_if_undisturbed(noria, job, tmp_path):
    source, whole, _ = job
    output = tmp_path / "out.jsonl"
    noria.kill(output, "-i", source, after=20)
    rows, manifest = noria.batch(source, output, expect=1)
    assert 0 < manifest["rows"]["kept_from_earlier_runs"] < len(rows)
    assert masked(output) == masked(whole)
