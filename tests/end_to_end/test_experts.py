"""Jobs of a model with experts: without loss by default, and never a silent loss."""

import random
import tomllib
from dataclasses import replace

import pytest
from command import Noria, answer, completion, plan_text, read_manifest, read_rows, write_lines
from model_on_disk import LAYERS, write_model

NUM_CHOSEN = 2
BUCKETS = plan_text(
    """\
max_length = 64
prefill = [[16, 4]]
decode_slots = 12
page = 8
steps_per_call = 2
"""
)
LOSSY = """
[experts]
overflow = "{overflow}"

[experts.prefill]
dispatch = "capacity"
capacity_factor = 1.0

[experts.decode]
dispatch = "capacity"
capacity_factor = 1.0
"""


@pytest.fixture(scope="module")
def mixtral(noria, tmp_path_factory) -> Noria:
    model = tmp_path_factory.mktemp("experts") / "model"
    write_model(model, tokenizer=False, num_experts=6)
    return replace(noria, model=model)


def rows_of(count: int, output_length: int = 6) -> list[dict]:
    rng = random.Random(count)
    return [
        completion(
            f"row-{i}",
            [rng.randrange(3, 250) for _ in range(rng.randint(1, 16))],
            temperature=0.9 * (i % 2),
            max_tokens=rng.randint(1, output_length),
            ignore_eos=True,
        )
        for i in range(count)
    ]


def plan_file(folder, overflow: str | None = None):
    path = folder / f"{overflow}.toml"
    path.write_text(BUCKETS + ("" if overflow is None else LOSSY.format(overflow=overflow)))
    return path


def losses(rows) -> dict[str, int]:
    """Return the counts in the answers, by row."""
    bodies = {row["custom_id"]: row["response"]["body"] for row in rows}
    return {
        name: body["noria"]["dropped_expert_choices"]
        for name, body in bodies.items()
        if "noria" in body
    }


def codes(rows) -> dict[str, str]:
    bodies = {row["custom_id"]: row["response"]["body"] for row in rows}
    return {name: body["error"]["code"] for name, body in bodies.items() if "error" in body}


@pytest.fixture(scope="module")
def lossless(mixtral, tmp_path_factory):
    """A job under a plan without a table of experts: its rows, output and manifest."""
    folder = tmp_path_factory.mktemp("lossless")
    source = write_lines(folder / "in.jsonl", rows_of(24))
    found = mixtral.batch(source, folder / "out.jsonl", "--plan", plan_file(folder))
    return source, *found


def test_by_default_company_never_changes_an_answer(mixtral, lossless, tmp_path):
    source, whole, _ = lossless
    assert losses(whole) == {}
    rows, expected = read_rows(source), {row["custom_id"]: answer(row) for row in whole}
    for name, part in {"shuffled": random.Random(1).sample(rows, 24), "few": rows[5:9]}.items():
        given = write_lines(tmp_path / f"{name}.jsonl", part)
        output = tmp_path / f"{name}.out.jsonl"
        found, _ = mixtral.batch(given, output, "--plan", plan_file(tmp_path))
        assert {r["custom_id"]: answer(r) for r in found} == {
            row["custom_id"]: expected[row["custom_id"]] for row in part
        }


def test_the_manifest_counts_every_choice(lossless):
    _, rows, manifest = lossless
    experts = manifest["generator"]["experts"]
    usage = [row["response"]["body"]["usage"] for row in rows]
    for phase, name in (("prefill", "prompt_tokens"), ("decode", "completion_tokens")):
        tokens = sum(of_row[name] for of_row in usage)
        layers = experts[phase]["layers"]
        assert [sum(layer["load"]) for layer in layers] == [tokens * NUM_CHOSEN] * LAYERS
        assert experts[phase]["choices"] == tokens * NUM_CHOSEN * LAYERS
        assert (experts[phase]["dispatch"], experts[phase]["dropped"]) == ("lossless", 0)
    assert manifest["rows"]["ok_with_dropped_choices"] == 0


def test_a_derived_plan_states_that_nothing_is_dropped_and_can_be_overridden(mixtral, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", rows_of(2))
    _, manifest = mixtral.batch(source, tmp_path / "out.jsonl")
    stated = {"dispatch": "lossless"}
    assert tomllib.loads(manifest["plan"])["experts"] == {
        "overflow": "error", "prefill": stated, "decode": stated,
    }  # fmt: skip
    factor = ("--set", "experts.decode.capacity_factor=9", "--set", "buckets.decode_slots=2")
    capacity = ("--set", "experts.decode.dispatch=capacity", *factor)
    _, manifest = mixtral.batch(source, tmp_path / "set.jsonl", *capacity)
    assert manifest["generator"]["experts"]["decode"]["capacity_factor"] == 9


def test_rows_that_lose_choices_say_so_or_are_errors_and_no_others(mixtral, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", rows_of(24))
    answered, manifest = mixtral.batch(
        source, tmp_path / "drop.jsonl", "--plan", plan_file(tmp_path, "drop")
    )
    refused, strict = mixtral.batch(
        source, tmp_path / "error.jsonl", "--plan", plan_file(tmp_path, "error"), expect=1
    )
    lost = losses(answered)
    assert 0 < len(lost) < len(answered)
    assert codes(answered) == {} and losses(refused) == {}
    assert codes(refused) == dict.fromkeys(lost, "expert_overflow")
    untouched = {row["custom_id"]: answer(row) for row in answered if row["custom_id"] not in lost}
    assert untouched.items() <= {row["custom_id"]: answer(row) for row in refused}.items()
    assert manifest["rows"]["ok_with_dropped_choices"] == len(lost)
    assert strict["rows"]["errors_by_code"] == {"expert_overflow": len(lost)}
    assert strict["rows"]["ok_with_dropped_choices"] == 0
    for found in (manifest, strict):
        experts = found["generator"]["experts"]
        assert sum(experts[phase]["dropped"] for phase in ("prefill", "decode")) == sum(
            lost.values()
        )


def test_a_killed_job_keeps_what_its_finished_rows_lost(mixtral, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", rows_of(200, output_length=40))
    output = tmp_path / "out.jsonl"
    arguments = ("-i", source, "-o", output, "--model", mixtral.model)
    plan = ("--plan", plan_file(tmp_path, "drop"))
    process = mixtral.start("batch", *arguments, *plan)
    journal = output.with_name("out.jsonl.journal")
    while not (journal.exists() and journal.read_bytes().count(b'"noria":') >= 5):
        assert process.poll() is None
    process.kill()
    process.communicate()
    kept = [r.partition(b"\t")[2] for r in journal.read_bytes().splitlines(keepends=True)]
    kept = {line for line in kept if line.endswith(b"\n")}
    assert any(b'"noria":' in line for line in kept)
    mixtral.run("batch", *arguments, *plan)
    assert kept <= set(output.read_bytes().splitlines(keepends=True))
    manifest = read_manifest(output)
    assert manifest["rows"]["kept_from_earlier_runs"] == len(kept)
    assert manifest["rows"]["ok_with_dropped_choices"] == len(losses(read_rows(output)))


def test_a_dense_model_takes_no_table_of_experts(noria, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", rows_of(2))
    arguments = ("batch", "-i", source, "--model", noria.model)
    plan = ("--plan", plan_file(tmp_path, "drop"))
    refused = noria.refuse(*arguments, "-o", tmp_path / "refused.jsonl", *plan)
    assert "plan [experts]: expected no such table" in refused


def test_another_dispatch_is_another_job(mixtral, lossless, tmp_path):
    """A finished output of one plan does not count as complete for another plan."""
    source, *_ = lossless
    arguments = ("-i", source, "-o", source.with_name("out.jsonl"), "--model", mixtral.model)
    plan = plan_file(tmp_path, "error")
    refused = mixtral.refuse("batch", *arguments, "--plan", plan)
    assert "is not the finished output of this input, model and settings" in refused


def test_llm_takes_the_same(noria, mixtral, monkeypatch):
    from noria.compile.expert_plan import ExpertPlan
    from noria.modelzoo.moe_config import Dispatch
    from noria.runtime import LLM, SamplingParams

    monkeypatch.setenv("XDG_CACHE_HOME", mixtral.environment["XDG_CACHE_HOME"])
    tight = Dispatch("capacity", 1.0)
    # rows of one repeated token choose the same experts everywhere in the first layer
    prompts = [[5] * 16] * 4
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    sizes = {"max_model_len": 32, "max_num_seqs": 4}
    llm = LLM(str(mixtral.model), experts=ExpertPlan(tight, tight, "drop"), **sizes)
    outputs = llm.generate(prompts, params)
    lost = [output.dropped_expert_choices for output in outputs]
    # its capacity goes to the first rows
    assert lost == sorted(lost) and lost[0] == 0 < lost[-1]
    assert [output.outputs[0].dropped_expert_choices for output in outputs] == lost
    with pytest.raises(ValueError, match=r"^experts: expected none beside a plan"):
        LLM(str(mixtral.model), plan=llm.plan, experts=ExpertPlan())
    with pytest.raises(ValueError, match="expected no such table"):
        LLM(str(noria.model), experts=ExpertPlan(), **sizes)
