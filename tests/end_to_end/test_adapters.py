"""Jobs whose rows name adapters: answers, repeats, shared beginnings, parts, refusals, `LLM`."""

import tomllib
from dataclasses import asdict

import numpy as np
import pytest
from adapter_on_disk import merge_by_hand, write_adapter
from command import answer, completion, plan_text, read_manifest, read_rows, write_lines
from model_on_disk import write_model
from related_prompts import hash_tokens
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.runtime import LLM, SamplingParams
from noria.runtime.adapters.adapter_set import AdapterSet
from noria.runtime.checkpoint import open_model
from noria.runtime.errors import InvalidAdapter, RowError

BUCKETS = """\
max_length = 48
chunk = 16
prefill = [[48, 2]]
decode_slots = 8
page = 8
steps_per_call = 4
score = true
"""
ROOM = """
[adapters]
count = 4
ranks = {"attention.qkv" = 12, "attention.output" = 6, "mlp.gate_up" = 4, "mlp.down" = 4}
"""
HEADS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
OPTIONS = {
    "plain": {"rank": 2, "modules": (*HEADS, *MLP)},
    "rslora": {"rank": 4, "modules": ("self_attn.q_proj", "self_attn.v_proj"), "use_rslora": True},
    "down": {"rank": 3, "modules": ("mlp.down_proj",)},
    "heads": {"rank": 4, "modules": HEADS[:3]},
}
BEGINNING = list(range(20, 52))
"""The beginning of all long prompts: two chunks."""


def adapters_of(folder) -> list[str]:
    return [f"{name}={folder / name}" for name in OPTIONS]


def requests(model: str) -> list[dict]:
    """Return rows for one adapter or the model itself, which differ in their names only."""
    greedy = {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprobs": 0, "echo": True}
    prompts = [[*BEGINNING, 60 + i] for i in range(3)] + [[5, 6, 7], [5, 6, 7]]
    lines = [completion(f"{model}-{i}", prompt, **greedy) for i, prompt in enumerate(prompts)]
    return [{**line, "body": {**line["body"], "model": model}} for line in lines]


@pytest.fixture(scope="module")
def folder(noria, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    for seed, (name, options) in enumerate(OPTIONS.items()):
        write_adapter(folder / name, noria.model, seed=seed, **options)
        merge_by_hand(folder / "merged" / name, noria.model, folder / name)
    (folder / "plain.toml").write_text(plan_text(BUCKETS))
    (folder / "plan.toml").write_text(plan_text(BUCKETS, others=ROOM))
    by_model = [requests(model) for model in ("model", *OPTIONS)]
    mixed = [row for rows in zip(*by_model, strict=True) for row in rows]
    write_lines(folder / "in.jsonl", [*mixed, completion("lost", [5], max_tokens=1)])
    options = ("--plan", folder / "plan.toml", "--adapters", *adapters_of(folder))
    noria.batch(folder / "in.jsonl", folder / "out.jsonl", *options, expect=1)
    return folder


def rows_of(path, model: str):
    return {row["custom_id"]: row for row in read_rows(path) if row["custom_id"].startswith(model)}


def logprobs(row) -> np.ndarray:
    return np.array(answer(row)[0][0]["logprobs"]["token_logprobs"][1:])


def test_rows_answer_as_in_jobs_of_merged_models(noria, folder, tmp_path):
    for model in ("model", *OPTIONS):
        source = write_lines(tmp_path / f"{model}.jsonl", requests(model))
        path = noria.model if model == "model" else folder / "merged" / model
        output, plan = tmp_path / f"{model}-out.jsonl", ("--plan", folder / "plain.toml")
        noria.run_here("batch", "-i", source, "-o", output, "--model", path, "--quiet", *plan)
        found, expected = rows_of(folder / "out.jsonl", model), rows_of(output, model)
        assert found.keys() == expected.keys()
        for custom_id, row in expected.items():
            if model == "model":
                # the same bits as in a plan without adapters
                assert answer(found[custom_id]) == answer(row)
            ours, theirs = logprobs(found[custom_id]), logprobs(row)
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=FLOAT32_MODEL_LOGPROB)
            tokens = [answer(x)[0][0]["logprobs"]["tokens"] for x in (found[custom_id], row)]
            assert tokens[0] == tokens[1]
    answers = {logprobs(row).tobytes() for row in rows_of(folder / "out.jsonl", "").values()
               if row["custom_id"].endswith("-0")}  # fmt: skip
    assert len(answers) == 1 + len(OPTIONS)


def test_rows_in_few_pages_answer_as_in_many(noria, folder, tmp_path):
    pages = plan_text(BUCKETS.replace("page = 8", "pages = 6\npage = 16"), others=ROOM)
    (tmp_path / "pages.toml").write_text(pages)
    options = ("--plan", tmp_path / "pages.toml", "--adapters", *adapters_of(folder))
    noria.batch(folder / "in.jsonl", tmp_path / "out.jsonl", *options, expect=1)
    found, expected = rows_of(tmp_path / "out.jsonl", ""), rows_of(folder / "out.jsonl", "")
    assert found.keys() == expected.keys()
    for custom_id in expected.keys() - {"lost"}:
        row, other = found[custom_id], expected[custom_id]
        np.testing.assert_allclose(
            logprobs(row), logprobs(other), rtol=0, atol=FLOAT32_MODEL_LOGPROB
        )
    (decode,) = read_manifest(tmp_path / "out.jsonl")["generator"]["buckets"]["decode"].values()
    assert decode["read_entries"] > 0


def test_rows_share_only_with_rows_of_their_adapter(folder):
    manifest = read_manifest(folder / "out.jsonl")
    assert manifest["rows"]["repeated"] == 1 + len(OPTIONS)
    # one chunk: a scored prompt shares a beginning together with the token after it
    num_saved = 2 * 16 * (1 + len(OPTIONS))
    assert manifest["generator"]["shared_prefixes"]["saved_tokens"] == num_saved


def test_a_row_with_an_unknown_model_is_an_error(folder):
    (row,) = (row for row in read_rows(folder / "out.jsonl") if row["custom_id"] == "lost")
    error = answer(row)
    assert error["param"] == "model"
    assert "expected one of model, " in error["message"] and "got 'm'" in error["message"]


def test_a_row_for_vectors_is_an_error_beside_adapters(noria, folder, tmp_path):
    rows = [{"prompt": [5, 6, 7], "max_tokens": 2}, {"input": [5, 6, 7]}]
    options = ("--plan", folder / "plan.toml", "--adapters", *adapters_of(folder))
    source = write_lines(tmp_path / "in.jsonl", rows)
    (row, refused), _ = noria.batch(source, tmp_path / "out.jsonl", *options, expect=1)
    assert "choices" in row["response"]["body"]
    message = answer(refused)["message"]
    assert "as the job has adapters (plain, " in message and "--merge-adapter" in message


def test_a_plan_of_the_planner_has_room_for_the_adapters(noria, folder, tmp_path):
    path, named = tmp_path / "plan.toml", ("--adapters", *adapters_of(folder))
    source = write_lines(tmp_path / "in.jsonl", requests("plain")[:2] + requests("heads")[:2])
    options = ("--model", noria.model, "--workload", source, "-o", path, "--dtype", "float32")
    noria.run_here("plan", *options, "--tries", "2", "--quiet", *named)
    plan = tomllib.loads(path.read_text())
    with open_model(noria.model) as files:
        paths = {name: folder / name for name in OPTIONS}
        assert plan["adapters"] == asdict(AdapterSet.open(files, paths).grid())
    rows, manifest = noria.batch(source, tmp_path / "out.jsonl", "--plan", path, *named)
    assert tomllib.loads(manifest["plan"]) == plan
    for row in rows:
        expected = rows_of(folder / "out.jsonl", row["custom_id"])[row["custom_id"]]
        np.testing.assert_allclose(
            logprobs(row), logprobs(expected), rtol=0, atol=FLOAT32_MODEL_LOGPROB
        )


def test_parts_are_merged_and_another_adapter_is_refused(noria, folder, tmp_path):
    given = ("-i", folder / "in.jsonl", "--model", noria.model, "--plan", folder / "plan.toml")
    named = ("--adapters", *adapters_of(folder), "--quiet")
    for part in range(2):
        output = tmp_path / f"part-{part}.jsonl"
        # the row with an error is in the second part
        noria.run("batch", *given, "-o", output, *named, "--rows", f"{part}/2", expect=part)
    noria.run("merge", *sorted(tmp_path.glob("part-?.jsonl")), "-o", tmp_path / "whole.jsonl",
              expect=1)  # fmt: skip
    whole, merged = (read_rows(path / name) for path, name in
                     ((folder, "out.jsonl"), (tmp_path, "whole.jsonl")))  # fmt: skip
    assert list(map(answer, whole)) == list(map(answer, merged))
    swapped = [f"plain={folder / 'down'}", *adapters_of(folder)[1:]]
    said = noria.refuse("batch", *given, "-o", folder / "out.jsonl", "--adapters", *swapped)
    assert "adapters: there" in said


@pytest.mark.parametrize(
    ("options", "plan", "code", "message"),
    [
        ({}, "plain.toml", 2, 'plan [adapters]: expected room for count = 1, ranks = {"mlp.down"'),
        ({"rank": 9}, "plan.toml", 2, '"mlp.down" = 9}, got 4 of'),
        ({"target_modules": ["no"]}, "plan.toml", 3, "got 'no'. Take the adapter of this model"),
        ({"modules": ("lm_head",)}, "plan.toml", 3, "got 'lm_head.weight', which rows cannot chan"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    noria, folder, tmp_path, options, plan, code, message
):
    adapter = write_adapter(tmp_path / "a", noria.model, **{"modules": MLP[2:], **options})
    rows = write_lines(tmp_path / "in.jsonl", [{"prompt": [5], "max_tokens": 2}])
    arguments = ("-i", rows, "-o", tmp_path / "out.jsonl", "--model", noria.model)
    given = ("--plan", folder / plan, "--adapters", f"a={adapter}")
    assert message in noria.refuse("batch", *arguments, *given, expect=code)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modules": ("w2",)}, r"got 'model\.layers\.0\.block_sparse_moe\.experts\.0"),
        ({"modules": ("q_proj",), "use_dora": True}, "got DoRA, which scales whole weights"),
    ],
)
def test_experts_and_dora_are_refused(tmp_path, options, message):
    write_model(tmp_path / "model", num_experts=2)
    adapter = write_adapter(tmp_path / "a", tmp_path / "model", **options)
    with open_model(tmp_path / "model") as files:
        adapters = AdapterSet.open(files, {"a": adapter})
        with pytest.raises(InvalidAdapter, match=message):
            adapters.grid()


def test_llm_takes_an_adapter_for_each_prompt(noria, folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", noria.environment["XDG_CACHE_HOME"])
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    adapters = {name: folder / name for name in OPTIONS}
    with LLM(str(noria.model), adapters=adapters, plan=folder / "plan.toml") as llm:
        names = [None, *OPTIONS]
        together = llm.generate([BEGINNING] * 5, params, adapter=names)
        alone = [llm.generate(BEGINNING, params, adapter=name)[0] for name in names]
        assert [x.outputs for x in together] == [x.outputs for x in alone]
        with pytest.raises(RowError, match="expected the model or one of its adapters"):
            llm.generate([5], params, adapter="other")


@pytest.mark.slow
def test_a_planned_prefix_belongs_to_one_adapter(noria, folder, tmp_path):
    shared = [[32, hash_tokens(BEGINNING, adapter)] for adapter in (None, "plain", "heads")]
    listed = ", ".join(f'[{length}, "{digest}"]' for length, digest in shared)
    table = f"\n[prefixes]\ngroups = 3\nrows = 2\nlength = 32\nshared = [{listed}]\n"
    plan = tmp_path / "plan.toml"
    plan.write_text(plan_text(BUCKETS.replace("score = true", ""), others=table + ROOM))
    rows = [
        {"id": f"{model}-{i}", "prompt": [*BEGINNING, 60 + i], "model": model}
        | {"temperature": 0, "max_tokens": 4, "ignore_eos": True, "logprobs": 0}
        for model in ("model", "plain", "down", "heads")
        for i in range(2)
    ]
    source = write_lines(tmp_path / "in.jsonl", rows)
    options = ("--plan", plan, "--adapters", *adapters_of(folder))
    found, _ = noria.batch(source, tmp_path / "out.jsonl", *options)
    for row in found:
        (other,) = rows_of(folder / "out.jsonl", row["custom_id"]).values()
        num_prompt = len(BEGINNING) + 1
        np.testing.assert_allclose(
            answer(row)[0][0]["logprobs"]["token_logprobs"],
            answer(other)[0][0]["logprobs"]["token_logprobs"][num_prompt:],
            rtol=0, atol=FLOAT32_MODEL_LOGPROB,
        )  # fmt: skip
