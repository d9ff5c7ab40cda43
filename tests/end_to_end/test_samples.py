"""Jobs whose rows stop their samples early: same bytes in all schedules, runs and parts."""

import random
import re

import pytest
from command import answer, chat, completion, read_manifest, read_rows, write_lines

from noria.runtime import LLM, SampleRule, SamplingParams

N = 6
BIAS = {2: 4.0, 67: 3.0, 68: 3.0}
"""Makes the end, `a` and `b` likely."""
FREE = {"n": N, "temperature": 1.5, "max_tokens": 40, "logit_bias": BIAS}
AGREE = {"answer": "([ab])", "stop_when": 3}
BOTH = {**AGREE, "probe_every": 6, "probes": 3}
RULES = [
    AGREE,
    BOTH,
    {**BOTH, "keep": "majority"},
    {**BOTH, "keep": "best"},
    {"answer": "([ab])", "stop_when": N // 2 + 1, "keep": "majority"},
]


def lines(rule_of) -> list[dict]:
    rng = random.Random(4)
    rows = []
    for i in range(40):
        prompt = [rng.randrange(3, 250) for _ in range(rng.randint(1, 30))]
        rows.append(completion(f"row-{i}", prompt, **FREE, **rule_of(i)))
    rows[5::9] = [
        completion(f"alone-{i}", "the water", max_tokens=30) for i in range(len(rows[5::9]))
    ]
    rows[7] = chat("chat", "the wheel", **FREE, **rule_of(2))
    return rows


def ruled(i: int) -> dict:
    return {"noria": RULES[i % len(RULES)]}


@pytest.fixture(scope="module")
def job(noria, tmp_path_factory):
    """An input, its output, and the answers of the same rows without rules."""
    folder = tmp_path_factory.mktemp("samples")
    source, output = write_lines(folder / "in.jsonl", lines(ruled)), folder / "out.jsonl"
    noria.batch(source, output)
    plain = write_lines(folder / "plain.jsonl", lines(lambda i: {}))
    rows, _ = noria.batch(plain, folder / "plain-out.jsonl")
    return source, output, rows


def masked(path) -> str:
    return re.sub(r'"created":\d+', '"created":0', path.read_text("utf-8"))


def choices_of(row: dict) -> list[dict]:
    return row["response"]["body"]["choices"]


def text_of(choice: dict) -> str:
    return choice["message"]["content"] if "message" in choice else choice["text"]


def test_samples_that_stop_are_the_beginnings_of_those_that_do_not(job):
    _, output, plain = job
    reasons = set()
    for row, whole in zip(read_rows(output), plain, strict=True):
        samples = choices_of(whole)
        for index, choice in enumerate(choices_of(row)):
            assert choice["index"] == index
            if "noria" not in choice:
                assert row["custom_id"].startswith("alone") and choice == samples[index]
                continue
            facts = choice["noria"]
            assert facts["samples"] == N
            reasons.add(facts["stopped_early"])
            alone = samples[facts["sample"]]
            if facts["stopped_early"] is None:
                assert (text_of(choice), choice["finish_reason"]) == (
                    text_of(alone),
                    alone["finish_reason"],
                )
            else:
                assert text_of(alone).startswith(text_of(choice).rstrip("\ufffd"))
                assert choice["finish_reason"] == "stop"
        assert (
            row["response"]["body"]["usage"]["completion_tokens"]
            <= (whole["response"]["body"]["usage"]["completion_tokens"])
        )
    assert reasons == {None, "agreement", "certainty"}


def test_one_choice_is_kept_and_more_than_half_of_the_votes_are_those_of_all(job):
    _, output, plain = job
    num_stopped = 0
    for i, (row, whole) in enumerate(zip(read_rows(output), plain, strict=True)):
        rule = RULES[i % len(RULES)]
        if "noria" not in choices_of(row)[0] or rule.get("keep", "all") == "all" or i == 7:
            continue
        (choice,) = choices_of(row)
        if rule["stop_when"] > N // 2:
            found = [re.search("[ab]", text_of(sample)) for sample in choices_of(whole)]
            answers = [match[0] if match else None for match in found]
            votes = [answers.count(a) if a else 0 for a in answers]
            assert choice["noria"]["answer"] == answers[votes.index(max(votes))]
            num_stopped += choice["noria"]["votes"] >= rule["stop_when"]
    assert num_stopped


def test_the_manifest_counts_what_stopped(noria, tmp_path):
    shown, rules = FREE | {"logprobs": 0}, [BOTH, {"answer": AGREE["answer"]}]
    rows = [completion(f"row-{i}", [30 + i], **shown, noria=rules[i % 2]) for i in range(12)]
    output = tmp_path / "out.jsonl"
    done, manifest = noria.batch(write_lines(tmp_path / "in.jsonl", rows), output)
    lengths = [
        [
            len(choice["logprobs"]["tokens"])
            for choice in choices_of(row)
            if choice["noria"]["stopped_early"] is not None
        ]
        for row in done
    ]
    assert any(len(stopped) > 1 for stopped in lengths) and not all(lengths)
    assert manifest["rows"]["ok_with_stopped_samples"] == sum(map(bool, lengths))
    assert manifest["stopped_samples"] == sum(map(len, lengths))
    most = FREE["max_tokens"]
    assert manifest["tokens_left"] == sum(most - n for stopped in lengths for n in stopped)
    tokens = sum(row["response"]["body"]["usage"]["completion_tokens"] for row in done)
    assert manifest["output_tokens"] == tokens
    decode = manifest["generator"]["buckets"]["decode"].values()
    num_decoded = sum(use["emitted_tokens"] for use in decode)
    # tokens that were cut are padding
    prompts = manifest["prompt_tokens"]
    assert manifest["generator"]["padding"]["real_tokens"] == prompts + tokens
    assert num_decoded > tokens


@pytest.mark.parametrize("num_slots", [3, 7])
def test_other_numbers_of_slots_give_the_same_answers(noria, job, tmp_path, num_slots):
    source, output, _ = job
    option = ("--set", f"buckets.decode_slots={num_slots}")
    rows, _ = noria.batch(source, tmp_path / "out.jsonl", *option)
    assert [answer(row) for row in rows] == [answer(row) for row in read_rows(output)]


def test_parts_merge_to_the_bytes_of_the_whole_job(noria, job, tmp_path):
    source, output, _ = job
    parts = [tmp_path / f"part{i}.jsonl" for i in range(2)]
    for i, part in enumerate(parts):
        noria.batch(source, part, "--rows", f"{i}/2", "--dtype", "float32")
    merged = tmp_path / "merged.jsonl"
    noria.run("merge", *parts, "-o", merged)
    whole = tmp_path / "whole.jsonl"
    noria.batch(source, whole, "--dtype", "float32")
    assert masked(merged) == masked(whole)
    assert [answer(row) for row in read_rows(whole)] == [answer(row) for row in read_rows(output)]
    for key in ("rows", "output_tokens", "stopped_samples", "tokens_left"):
        assert read_manifest(merged)[key] == read_manifest(whole)[key]


def test_a_job_that_is_killed_goes_on_to_the_same_bytes(noria, job, tmp_path):
    source, whole, _ = job
    output = tmp_path / "out.jsonl"
    for count in (5, 15):
        noria.kill(output, "-i", source, after=count)
    noria.batch(source, output)
    assert masked(output) == masked(whole)
    counted = ("rows", "output_tokens", "stopped_samples", "tokens_left")
    manifest, expected = read_manifest(output), read_manifest(whole)
    manifest["rows"]["kept_from_earlier_runs"] = 0
    assert [manifest[key] for key in counted] == [expected[key] for key in counted]


def test_a_wrong_rule_is_one_error_row(noria, tmp_path):
    rules = [{"answer": "(a+)+b"}, {"answer": "x", "stop_wen": 2}, {"answer": "x", "stop_when": 9}]
    rows = [completion(f"bad-{i}", "the water", n=4, noria=rule) for i, rule in enumerate(rules)]
    rows.append(completion("good", "the water", n=2, max_tokens=4, noria={"answer": "x"}))
    source = write_lines(tmp_path / "in.jsonl", rows)
    done, manifest = noria.batch(source, tmp_path / "out.jsonl", expect=1)
    errors = [row["response"]["body"].get("error") for row in done]
    params = [error and error["param"] for error in errors]
    assert params == ["noria.answer", "noria.stop_wen", "noria.stop_when", None]
    assert manifest["rows"]["errors"] == 3


def test_a_rule_works_from_python(noria):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", noria.environment["XDG_CACHE_HOME"])
        with LLM(model=str(noria.model), max_model_len=64, max_num_seqs=4) as llm:
            whole = llm.generate("the water", SamplingParams(**FREE, seed=3))[0]
            rule = SampleRule("([ab])", stop_when=2)
            early = llm.generate("the water", SamplingParams(**FREE, seed=3, stopping=rule))[0]
    assert early.samples.stopped and early.samples.total == N
    for stopped, alone in zip(early.outputs, whole.outputs, strict=True):
        assert alone.token_ids[: len(stopped.token_ids)] == stopped.token_ids
        if stopped.stopped_early is None:
            assert stopped.text == alone.text
