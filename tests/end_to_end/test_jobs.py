"""Whole jobs through the command: answers, invariance, phases, bad rows."""

import json
import random
import time

import numpy as np
import pytest
from command import answer, chat, completion, plan_text, read_rows, write_lines
from model_on_disk import write_model
from safetensors.numpy import load_file, save_file
from tolerances import FLOAT32_MODEL_LOGPROB, NEAR_TIE_GAP

GREEDY = {"temperature": 0, "max_tokens": 8}
BUCKETS = """\
max_length = 64
prefill = [[16, 3], [48, 2]]
decode_slots = 5
page = 8
steps_per_call = 4
score = true
"""


@pytest.fixture(scope="module")
def plan(noria, tmp_path_factory):
    from noria.runtime.checkpoint import open_model

    with open_model(str(noria.model)) as files:
        fingerprint = files.fingerprint()
    path = tmp_path_factory.mktemp("plan") / "plan.toml"
    path.write_text(plan_text(BUCKETS, fingerprint=fingerprint))
    return path


def mixed_rows(count: int, seed: int = 0) -> list[dict]:
    rng = random.Random(seed)
    words = [
        "the",
        "water",
        "wheel",
        "turns",
        "buckets",
        "of",
        "fixed",
        "size",
        "driven",
        "by",
        "the",
        "stream",
    ]
    rows = []
    for i in range(count):
        text = " ".join(rng.choices(words, k=rng.randint(1, 9)))
        options = [
            GREEDY,
            {"temperature": 0.9, "max_tokens": 10, "seed": i},
            {"temperature": 1.1, "max_tokens": 6, "top_p": 0.9, "top_k": 20, "logprobs": 2},
            {"temperature": 0, "max_tokens": 5, "n": 2, "presence_penalty": 1.0},
            {"temperature": 0, "max_tokens": 3, "echo": True, "logprobs": 1},
        ][i % 5]
        rows.append(completion(f"row-{i}", text, **options))
    rows.append(chat("chat", "turns", temperature=0, max_tokens=6, logprobs=True, top_logprobs=2))
    return rows


def answers(rows) -> dict:
    return {row["custom_id"]: answer(row) for row in rows}


def test_rows_are_the_same_under_permutation_subset_and_split(noria, plan, tmp_path):
    rows = mixed_rows(20)
    whole, manifest = noria.batch(
        write_lines(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", "--plan", plan
    )
    assert [row["custom_id"] for row in whole] == [row["custom_id"] for row in rows]
    assert manifest["rows"] == {**manifest["rows"], "total": 21, "ok": 21, "errors": 0}
    parts = {
        "permuted": random.Random(1).sample(rows, len(rows)),
        "first": rows[:8],
        "second": rows[8:],
    }
    for name, part in parts.items():
        source = write_lines(tmp_path / f"{name}.jsonl", part)
        found, _ = noria.batch(source, tmp_path / f"{name}.out.jsonl", "--plan", plan)
        expected = answers(whole)
        assert answers(found) == {row["custom_id"]: expected[row["custom_id"]] for row in part}


def test_a_run_through_every_bucket_compiles_nothing_and_accounts_for_its_time(
    noria, plan, tmp_path
):
    greedy = {"temperature": 0, "ignore_eos": True}
    rows = [
        completion("short", [5, 6], **greedy, max_tokens=20),
        completion("long", [7] * 30, **greedy, max_tokens=4),
        completion("score-short", [5, 6, 7], echo=True, max_tokens=0, logprobs=1),
        completion("score-long", [9] * 40, echo=True, max_tokens=0, logprobs=1),
    ]
    source = write_lines(tmp_path / "in.jsonl", rows)
    started = time.monotonic()
    _, manifest = noria.batch(source, tmp_path / "out.jsonl", "--plan", plan)
    lifetime = time.monotonic() - started
    buckets = manifest["generator"]["buckets"]
    assert set(buckets["prefill"]) == {"16x3", "48x2", "16x3 scored", "48x2 scored"}
    assert set(buckets["decode"]) == {"64"}
    assert manifest["compiles_during_run"] == 0
    attention = manifest["generator"]["attention"]
    assert {phase: said.partition(" ")[0] for phase, said in attention.items()} == {
        "prefill": "xla",
        "decode": "xla",
    }
    phases = sum(manifest[f"{name}_seconds"] for name in ("scan", "load", "build", "run"))
    assert phases == pytest.approx(manifest["wall_seconds"], rel=0.01, abs=0.05)
    # the remaining time is the interpreter's start and end
    assert 0 < lifetime - manifest["wall_seconds"] < 5


BAD_LINES = {
    "not json": (b'{"custom_id": "x", ', "invalid_json"),
    "bad utf-8": (b'{"prompt": "\xff\xfe"}', "invalid_utf8"),
    "missing custom_id": (
        b'{"method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}',
        "missing_custom_id",
    ),
    "NaN": (b'{"custom_id": "nan", "prompt": "a", "temperature": NaN}', "invalid_json"),
}
BAD_ROWS = {
    "empty": (completion("empty", "", **GREEDY), "empty_prompt"),
    "no-ids": (completion("no-ids", [], **GREEDY), "empty_prompt"),
    "negative": (completion("negative", [5, -1], **GREEDY), "invalid_token_id"),
    "too-large": (completion("too-large", [5, 10**6], **GREEDY), "invalid_token_id"),
    "too-long": (completion("too-long", [5] * 500, **GREEDY), "context_length_exceeded"),
    "temperature": (completion("temperature", "a", temperature=-1), "invalid_request"),
    "top_p": (completion("top_p", "a", top_p=1.5), "invalid_request"),
    "unknown": (completion("unknown", "a", max_token=3), "unknown_parameter"),
    "stream": (completion("stream", "a", stream=True), "invalid_request"),
    "n": (completion("n", "a", n=10**6), "invalid_request"),
    "zero": (completion("zero", "a", max_tokens=0), "invalid_request"),
    "endless": (completion("endless", "a", max_tokens=10**12), "invalid_request"),
    "far": (completion("far", "a", max_tokens=10**6), "context_length_exceeded"),
}


def test_each_bad_row_is_one_error_row_and_the_good_rows_do_not_notice(noria, tmp_path):
    good = [completion(f"good-{i}", f"the wheel {i}", **GREEDY) for i in range(4)]
    alone, manifest = noria.batch(
        write_lines(tmp_path / "good.jsonl", good), tmp_path / "good.out.jsonl"
    )
    plan = tmp_path / "plan.toml"
    plan.write_text(manifest["plan"])

    lines = [json.dumps(good[0]).encode()]
    lines += [line for line, _ in BAD_LINES.values()]
    lines += [json.dumps(good[1]).encode(), json.dumps(good[1]).encode()]
    lines += [json.dumps(row).encode() for row, _ in BAD_ROWS.values()]
    lines += [json.dumps(row).encode() for row in good[2:]]
    source = tmp_path / "mixed.jsonl"
    source.write_bytes(b"\n".join(lines) + b"\n")
    rows, manifest = noria.batch(source, tmp_path / "mixed.out.jsonl", "--plan", plan, expect=1)
    assert len(rows) == len(lines)
    expected = [None, *(code for _, code in BAD_LINES.values()), None, "duplicate_custom_id"]
    expected += [code for _, code in BAD_ROWS.values()] + [None, None]
    assert [code_of(row) for row in rows] == expected
    healthy = [answer(row) for row in rows if code_of(row) is None]
    assert healthy == [answer(row) for row in alone]
    assert manifest["rows"]["errors"] == len(lines) - len(good)


def code_of(row) -> str | None:
    if row["response"] is None:
        return row["error"]["code"]
    error = row["response"]["body"].get("error")
    return error and error["code"]


def test_a_row_beyond_the_models_length_does_not_stretch_the_derived_grid(noria, tmp_path):
    rows = [completion("good", "the wheel", **GREEDY), BAD_ROWS["too-long"][0], BAD_ROWS["far"][0]]
    source = write_lines(tmp_path / "in.jsonl", rows)
    found, manifest = noria.batch(source, tmp_path / "out.jsonl", expect=1)
    assert [code_of(row) for row in found] == [None, *["context_length_exceeded"] * 2]
    assert "max_length = 16" in manifest["plan"]


def test_a_job_for_the_cpu_starts_no_other_backend(noria, plan, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", mixed_rows(1))
    arguments = ("-i", source, "-o", tmp_path / "out.jsonl", "--model", noria.model)
    done = noria.run("batch", *arguments, "--plan", plan, "--target", "cpu")
    # libtpu, where it is installed, complains about a machine without TPUs
    assert "TPU" not in done.stderr
    assert "libtpu" not in done.stderr


def test_sampling_parameters_reach_the_graph(noria, plan, tmp_path):
    rows = [
        completion("plain", "the water", **GREEDY, ignore_eos=True),
        completion("forced", "the water", **GREEDY, logit_bias={"77": 100}),
        completion("scored", "the water wheel", echo=True, max_tokens=0, logprobs=2),
        completion("ids", [5, 6, 7, 8], echo=True, max_tokens=0, logprobs=1),
        completion("three", "the water", temperature=1.0, max_tokens=6, n=3, seed=5),
        completion("minimum", "the water", **GREEDY, min_tokens=8),
    ]
    source = write_lines(tmp_path / "in.jsonl", rows)
    found, _ = noria.batch(source, tmp_path / "out.jsonl", "--plan", plan)
    by_id = {row["custom_id"]: row["response"]["body"] for row in found}
    assert by_id["plain"]["usage"]["completion_tokens"] == 8
    assert by_id["plain"]["choices"][0]["finish_reason"] == "length"
    assert by_id["minimum"]["usage"]["completion_tokens"] == 8
    texts = [choice["text"] for choice in by_id["three"]["choices"]]
    assert len(set(texts)) == 3
    scored = by_id["ids"]["choices"][0]["logprobs"]["token_logprobs"]
    assert scored[0] is None
    assert len(scored) == 4
    assert all(value < 0 for value in scored[1:])
    assert by_id["scored"]["choices"][0]["text"] == "the water wheel"
    forced = by_id["forced"]["choices"][0]["text"]
    assert forced == forced[: len(forced) // 8] * 8


def test_a_stop_string_across_tokens_cuts_the_text(noria, plan, tmp_path):
    body = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    source = write_lines(tmp_path / "plain.jsonl", [completion("plain", "the water", **body)])
    (plain,), _ = noria.batch(source, tmp_path / "plain.out.jsonl", "--plan", plan)
    text = plain["response"]["body"]["choices"][0]["text"]
    stop = text[3:6]
    row = completion("stop", "the water", **body, stop=stop)
    source = write_lines(tmp_path / "stop.jsonl", [row])
    (cut,), _ = noria.batch(source, tmp_path / "stop.out.jsonl", "--plan", plan)
    choice = cut["response"]["body"]["choices"][0]
    assert choice["text"] == text[: text.index(stop)]
    assert choice["finish_reason"] == "stop"


def test_an_override_changes_the_plan_and_the_answers_stay_close(noria, plan, tmp_path):
    options = {**GREEDY, "ignore_eos": True, "logprobs": True, "top_logprobs": 2}
    rows = [chat(f"row-{i}", "the wheel turns"[i:], **options) for i in range(5)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    override = ("--set", "buckets.decode_slots=2", "--set", "buckets.prefill=[[48, 1]]")
    expected, _ = noria.batch(source, tmp_path / "whole.jsonl", "--plan", plan)
    found, manifest = noria.batch(source, tmp_path / "out.jsonl", "--plan", plan, *override)
    assert "decode_slots = 2" in manifest["plan"]
    for row, reference in zip(map(greedy_answer, found), map(greedy_answer, expected), strict=True):
        best, second = np.sort(reference["top"])[:, ::-1].T
        assert min(best - second) > NEAR_TIE_GAP, "choose a prompt without near ties"
        assert row["tokens"] == reference["tokens"]
        np.testing.assert_allclose(
            row["logprobs"], reference["logprobs"], rtol=0, atol=FLOAT32_MODEL_LOGPROB
        )


def greedy_answer(row) -> dict:
    """The eight tokens of an answer, their log-probabilities, and those of the best two."""
    steps = row["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert len(steps) == GREEDY["max_tokens"]
    return {
        "tokens": [(step["token"], step["bytes"]) for step in steps],
        "logprobs": [step["logprob"] for step in steps],
        "top": [[top["logprob"] for top in step["top_logprobs"]] for step in steps],
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sha256:", "sha256:0", "model.fingerprint"),
        ("decode_slots", "decode_slotz", "decode_slotz"),
    ],
)
def test_a_plan_that_is_not_this_models_is_refused(noria, plan, tmp_path, old, new, message):
    other = tmp_path / "plan.toml"
    other.write_text(plan.read_text().replace(old, new, 1))
    source = write_lines(tmp_path / "in.jsonl", mixed_rows(1))
    arguments = ("-i", source, "-o", tmp_path / "out.jsonl", "--model", noria.model)
    assert message in noria.refuse("batch", *arguments, "--plan", other)


def test_bfloat16_answers_and_the_plan_says_so(noria, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", mixed_rows(5))
    rows, manifest = noria.batch(source, tmp_path / "out.jsonl", "--dtype", "bfloat16")
    assert all(code_of(row) is None for row in rows)
    assert 'dtype = "bfloat16"' in manifest["plan"]


def test_a_model_without_a_tokenizer_serves_token_ids_and_refuses_text(noria, tmp_path):
    write_model(tmp_path / "bare", tokenizer=False)
    rows = [completion("ids", [5, 6, 7], **GREEDY), completion("text", "the water", **GREEDY)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out.jsonl"
    noria.run("batch", "-i", source, "-o", output, "--model", tmp_path / "bare", expect=1)
    ids, text = read_rows(output)
    assert code_of(ids) is None
    assert code_of(text) == "invalid_request"


def test_a_directory_of_pickles_is_refused_unopened(noria, tmp_path):
    folder = tmp_path / "pickled"
    folder.mkdir()
    (folder / "config.json").write_text((noria.model / "config.json").read_text())
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle")
    source = write_lines(tmp_path / "in.jsonl", mixed_rows(1))
    arguments = ("-i", source, "-o", tmp_path / "out.jsonl", "--model", folder)
    assert "safetensors" in noria.refuse("batch", *arguments, expect=3)


def test_nan_weights_end_as_error_rows(noria, tmp_path):
    folder = tmp_path / "nan"
    write_model(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = np.nan
    save_file(tensors, folder / "model.safetensors")
    rows = [completion("good", [5, 6], **GREEDY), completion("poisoned", [5, 7], **GREEDY)]
    source = write_lines(tmp_path / "in.jsonl", rows)
    output = tmp_path / "out.jsonl"
    noria.run("batch", "-i", source, "-o", output, "--model", folder, expect=1)
    good, poisoned = read_rows(output)
    assert code_of(good) is None
    assert code_of(poisoned) == "nonfinite_logits"
