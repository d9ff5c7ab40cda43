"""Jobs with weights and caches in codes: their plan, their answers, and plans that are refused."""

import json
import tomllib

import numpy as np
import pytest
from command import answer, completion, read_rows, write_lines
from model_on_disk import write_model
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.plan import Plan
from noria.runtime import LLM, SamplingParams

CODES = ("--set", "numbers.weights=int4", "--set", "numbers.group=8", "--set", "numbers.cache=int8")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    rng = np.random.default_rng(3)
    rows = [
        completion(f"row-{i}", rng.integers(3, 250, 4 + i).tolist(), temperature=0, max_tokens=6)
        for i in range(6)
    ]
    rows[0]["body"] |= {"echo": True, "max_tokens": 0, "logprobs": 1}
    return write_lines(tmp_path_factory.mktemp("numbers") / "in.jsonl", rows)


def run(noria, source, name, *options):
    output = source.with_name(name)
    rows, manifest = noria.batch(source, output, "--dtype", "float32", *options)
    return [answer(row) for row in rows], tomllib.loads(manifest["plan"])


def test_a_job_runs_in_the_format_that_it_asks_for(noria, source):
    float_rows, float_plan = run(noria, source, "float.jsonl")
    rows, plan = run(noria, source, "int4.jsonl", *CODES)
    assert float_plan["numbers"] == {"dtype": "float32"}
    assert plan["numbers"] == {"dtype": "float32", "weights": "int4", "group": 8, "cache": "int8"}
    assert rows != float_rows


def test_rows_keep_their_answers_among_other_rows(noria, source):
    """Under one plan, the answers of a subset in another order are equal."""
    rows, plan = run(noria, source, "all.jsonl", *CODES)
    path = source.with_name("plan.toml")
    path.write_text(Plan.from_table(plan).to_toml(), encoding="utf-8")
    lines = [json.loads(line) for line in source.read_text("utf-8").splitlines()]
    some = write_lines(source.with_name("some.jsonl"), lines[::-2])
    output = source.with_name("some-out.jsonl")
    noria.batch(some, output, "--plan", path)
    assert [answer(row) for row in read_rows(output)] == rows[::-2]


def test_simulated_devices_give_the_scores_of_one_device(noria, source):
    """The weights load in shards, which share the scales of the whole weight."""
    line = write_lines(
        source.with_name("score.jsonl"),
        [json.loads(source.read_text("utf-8").splitlines()[0])],
    )
    layout = ("--target", "cpu:2", "--layout", "weight-stationary-1d@tensor=2")
    scores = []
    for name, options in (("one.jsonl", ()), ("two.jsonl", layout)):
        output = line.with_name(name)
        int8 = ("--dtype", "float32", "--set", "numbers.weights=int8")
        rows, _ = noria.batch(line, output, *int8, *options)
        logprobs = rows[0]["response"]["body"]["choices"][0]["logprobs"]["token_logprobs"]
        scores.append(logprobs[1:])
    np.testing.assert_allclose(*scores, rtol=0, atol=FLOAT32_MODEL_LOGPROB)


def test_llm_takes_formats_as_keys_of_a_plan(noria):
    rules = {"head.table": {"weights": "int8", "group": 8}}
    numbers = {"weights": "int8", "rules": rules, "cache": "float8"}
    with LLM(str(noria.model), dtype="float32", numbers=numbers, max_model_len=32) as llm:
        assert (llm.plan.numbers.weights, llm.plan.numbers.cache) == ("int8", "float8")
        params = SamplingParams(temperature=0, max_tokens=2)
        (output,) = llm.generate([5, 6, 7], params)
        assert len(output.outputs[0].token_ids) == 2
        with pytest.raises(ValueError, match="numbers: expected none beside a plan"):
            LLM(str(noria.model), plan=llm.plan, numbers=numbers)


def test_experts_load_in_codes(tmp_path):
    write_model(tmp_path / "model", num_experts=4)
    numbers = {"weights": "int4", "group": 8, "cache": "int8"}
    with LLM(str(tmp_path / "model"), dtype="float32", numbers=numbers, max_model_len=32) as llm:
        (output,) = llm.generate([5, 6, 7], SamplingParams(temperature=0, max_tokens=2))
        assert len(output.outputs[0].token_ids) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ("numbers.weights=int3",),
            "numbers.weights: expected one of float, int8, float8, int4, as_",
        ),
        (("numbers.cache=int2",), "numbers.cache: expected one of float, int8, float8, int4, got"),
        (("numbers.weights=int4", "numbers.group=7"), "numbers.group: expected a divisor of the"),
        (('numbers.rules={"*.norms" = {weights = "float"}}',), "'*.norms': expected a pattern"),
    ],
)
def test_a_format_that_cannot_be_is_refused_by_name(noria, source, options, message):
    output = source.with_name("refused.jsonl")
    given = [word for option in options for word in ("--set", option)]
    said = noria.refuse("batch", "-i", source, "-o", output, "--model", noria.model, *given)
    assert message in said
