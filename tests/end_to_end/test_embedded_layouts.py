"""The embedded model under layouts gives the greedy tokens of one device.

The model has 9 query heads and 3 key/value heads, so its heads split over three devices. Six
devices hold replicas, or split in two dimensions. Near ties follow the rule for different
executables. On one device and in the job the layers run in a loop, which compiles sooner; `--slow`
unrolls them.
"""

from collections.abc import Sequence

import pytest
from command import chat, read_manifest, read_rows, write_lines
from tolerances import NEAR_TIE_GAP

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.modelzoo import axes
from noria.runtime import LLM, SamplingParams
from noria.runtime.files.layout_files import read_layout_table
from noria.runtime.request import RequestOutput
from noria.sharding.layout import Layout

NUM_TOKENS = 16
QUESTIONS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short poem about an old mill by the river.",
    "How do I make bread? List the steps.",
    "Who was Ada Lovelace?",
)
LAYOUTS = (
    "data-parallel@data=6",
    "data-tensor-batch-attention@data=2,tensor=3",
    "data-tensor@data=2,tensor=3",
    "embed-parallel@tensor=3",
    "gpu-host@data=2,tensor=3",
    "sequence-parallel@tensor=3",
    "v5e-host@tensor=3",
    "v5p-slice@data=2,tensor=3",
    "weight-gathered-all@data=2,tensor=3",
    "weight-gathered@data=2,tensor=3",
    "weight-stationary-1d-batch-attention@tensor=3",
    "weight-stationary-1d-kv-copies@tensor=3",
    "weight-stationary-1d@tensor=3",
    "weight-stationary-2d@data=2,tensor=3",
)


def answers(layout: Layout | None, scan_layers: bool = False) -> list[RequestOutput]:
    num_devices = 1 if layout is None else layout.mesh.num_devices
    groups = 1
    if layout is not None:
        groups = layout.mesh.num_shards(layout.phase("decode")[axes.ATTENTION_BATCH])
    grid = BucketGrid(96, ((72, 6),), 6, page=16, slot_groups=groups)
    target, model = f"cpu:{num_devices}", PlannedModel("smollm2", "", scan_layers)
    llm = LLM("smollm2", plan=Plan(target, model, Numbers("float32"), grid, layout))
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
    outputs = llm.chat(conversations, params)
    llm.close()
    return outputs


@pytest.fixture(scope="module")
def expected(optimizes: bool) -> list[RequestOutput]:
    return answers(None, scan_layers=not optimizes)


def gap(answer: RequestOutput, step: int) -> float:
    """Return the gap between the two likeliest tokens of a step."""
    (_, best), (_, second) = answer.outputs[0].logprobs[step].top
    return best - second


def assert_same_up_to_a_near_tie(got: Sequence[int], expected: RequestOutput) -> None:
    wanted = expected.outputs[0].token_ids
    assert len(got) == len(wanted) == NUM_TOKENS
    for step, (token, other) in enumerate(zip(got, wanted, strict=True)):
        if token != other:
            assert gap(expected, step) < NEAR_TIE_GAP, f"step {step}: {token}, not {other}"
            return


@pytest.mark.slow
@pytest.mark.parametrize("spelling", LAYOUTS)
def test_greedy_tokens_are_those_of_one_device(expected, spelling):
    layout = Layout.from_table(read_layout_table(spelling))
    for got, wanted in zip(answers(layout), expected, strict=True):
        assert_same_up_to_a_near_tie(got.outputs[0].token_ids, wanted)


def test_a_batch_job_under_a_layout_writes_the_answers_of_one_device(
    noria, tmp_path, expected, optimizes
):
    """The command simulates six devices of its own."""
    options = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    lines = [chat(question, question, **options) for question in QUESTIONS]
    source, output = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    layout = ("--target", "cpu:6", "--layout", "data-tensor@data=2,tensor=3")
    in_a_loop = () if optimizes else ("--set", "model.scan_layers=true")
    noria.run("batch", "-i", source, "-o", output, "--model", "smollm2", *layout, *in_a_loop)
    rows = read_rows(output)
    assert [row["custom_id"] for row in rows] == list(QUESTIONS)
    for row, wanted in zip(rows, expected, strict=True):
        (choice,) = row["response"]["body"]["choices"]
        assert all(gap(wanted, step) >= NEAR_TIE_GAP for step in range(NUM_TOKENS))
        assert choice["message"]["content"] == wanted.outputs[0].text
    assert read_manifest(output)["compiles_during_run"] == 0


def test_a_layout_that_cannot_be_is_refused_with_all_that_is_wrong(noria, tmp_path):
    """The layout splits nine query heads and three key/value heads over four devices."""
    source = write_lines(tmp_path / "in.jsonl", [chat("a", "Hello")])
    output = tmp_path / "out.jsonl"
    layout = ("--target", "cpu:8", "--layout", "data-tensor")
    said = noria.refuse("batch", "-i", source, "-o", output, "--model", "smollm2", *layout)
    assert said.splitlines()[-3:] == [
        "noria: layout 'data-tensor' (data=2, tensor=4) is illegal:",
        '  kv_heads: 3 heads do not divide over 4 devices ("tensor"). Set kv_heads = "" to keep a '
        "copy of a head on every device whose queries read it, or shard attention over batch "
        "(attention_batch).",
        '  query_heads = "tensor": the number of query heads is 9, which does not divide over 4 '
        "devices. Change the size of a mesh axis, or the rule.",
    ]
    assert not output.exists()
