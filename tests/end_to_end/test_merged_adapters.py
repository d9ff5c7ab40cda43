"""`--merge-adapter`: a job of a merged adapter, its refusals, and `LLM(merge_adapter=...)`."""

import re

import numpy as np
import pytest
from adapter_on_disk import merge_by_hand, write_adapter
from command import answer, completion, plan_text, read_manifest, read_rows, write_lines
from model_on_disk import write_model
from tolerances import FLOAT32_ELEMENTWISE

from noria.runtime import LLM, SamplingParams

BUCKETS = """\
max_length = 32
prefill = [[8, 2]]
decode_slots = 2
page = 8
steps_per_call = 4
score = true
"""
SCORED = {"echo": True, "max_tokens": 0, "logprobs": 0}


@pytest.fixture(scope="module")
def folder(noria, tmp_path_factory):
    folder = tmp_path_factory.mktemp("merged")
    write_adapter(folder / "adapter", noria.model, use_rslora=True)
    merge_by_hand(folder / "merged", noria.model, folder / "adapter")
    (folder / "plan.toml").write_text(plan_text(BUCKETS))
    rows = [completion(f"row-{i}", [3 + i, 4, 5, 9], temperature=0, **SCORED) for i in range(3)]
    rows.append(completion("told", [7, 8], temperature=0, max_tokens=6))
    write_lines(folder / "in.jsonl", rows)
    return folder


def logprobs(rows) -> np.ndarray:
    choices = [row["response"]["body"]["choices"][0] for row in rows]
    return np.array([c["logprobs"]["token_logprobs"][1:] for c in choices if c["logprobs"]])


def test_a_job_with_a_merged_adapter_equals_a_job_of_the_merged_model(noria, folder, tmp_path):
    plan = ("--plan", folder / "plan.toml")
    merge = ("--merge-adapter", folder / "adapter")
    source, output = folder / "in.jsonl", tmp_path / "out.jsonl"
    rows, manifest = noria.batch(source, output, *plan, *merge)
    arguments = ("-i", source, "-o", tmp_path / "by_hand.jsonl", "--model", folder / "merged")
    noria.run_here("batch", *arguments, *plan)
    expected = read_rows(tmp_path / "by_hand.jsonl")
    np.testing.assert_allclose(logprobs(rows), logprobs(expected), rtol=0, atol=FLOAT32_ELEMENTWISE)
    assert answer(rows[-1])[0][0]["text"] == answer(expected[-1])[0][0]["text"]
    assert manifest["configuration"]["merged adapter"].startswith("sha256:")
    assert manifest["weights"] != read_manifest(tmp_path / "by_hand.jsonl")["weights"]
    # the output belongs to the job with the adapter only
    said = noria.refuse("batch", "-i", source, "-o", output, "--model", noria.model, *plan)
    assert "merged adapter: there sha256:" in said


def test_llm_merges_an_adapter(noria, folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", noria.environment["XDG_CACHE_HOME"])
    found = []
    for model, adapter in ((noria.model, folder / "adapter"), (folder / "merged", None)):
        with LLM(str(model), merge_adapter=adapter, plan=folder / "plan.toml") as llm:
            params = SamplingParams(temperature=0, max_tokens=6)
            found.append(llm.generate([[7, 8]], params)[0].outputs[0].token_ids)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type: expected LORA, as other adapters are not implem"),
        ({"bias": "all"}, "bias: expected none, as adapters with biases"),
        ({"target_modules": ["q_proj", "c_attn"]}, "expected modules of the model .*got 'c_attn'"),
        ({"target_modules": ["q_proj", "down_proj"]}, "v_proj', which is no target"),
        (
            {"target_modules": ["q_proj", "v_proj", "down_proj", "o_proj"]},
            "expected matrices of 'model.layers.0.self_attn.o_proj', as its target, got none",
        ),
        ({"r": 8}, "expected matrices of rank 8, got"),
        ({"lora_bias": True}, "only keys whose meaning is known, got lora_bias = True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: expected a start that keeps"),
        ({"trainable_token_indices": [3]}, "known, got trainable_token_indices = "),
        ({"a_new_option": 1}, "known, got a_new_option = 1"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(noria, tmp_path, options, message):
    adapter = write_adapter(tmp_path / "adapter", noria.model, **options)
    rows = write_lines(tmp_path / "in.jsonl", [completion("a", [5], max_tokens=2)])
    (tmp_path / "plan.toml").write_text(plan_text(BUCKETS))
    arguments = ("-i", rows, "-o", tmp_path / "out.jsonl", "--model", noria.model)
    given = ("--merge-adapter", adapter, "--plan", tmp_path / "plan.toml")
    said = noria.refuse("batch", *arguments, *given, expect=3)
    assert re.search(message, said), said


def test_an_adapter_of_another_shape_is_refused(noria, tmp_path):
    write_model(tmp_path / "other", mlp=64)
    adapter = write_adapter(tmp_path / "adapter", tmp_path / "other")
    rows = write_lines(tmp_path / "in.jsonl", [completion("a", [5], max_tokens=2)])
    arguments = ("-i", rows, "-o", tmp_path / "out.jsonl", "--model", noria.model)
    said = noria.refuse("batch", *arguments, "--merge-adapter", adapter, expect=3)
    assert "mlp.down_proj.weight for its shape (32, 48), got (32, 64)" in said
