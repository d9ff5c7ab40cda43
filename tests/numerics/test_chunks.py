"""The embedded model gives the same greedy tokens from chunked prompts as from whole prompts.

The grids have different executables, so the near-tie rule applies: the tokens are the same up to
the first step whose best two tokens are closer than `NEAR_TIE_GAP`. The layers run in a loop, which
compiles much sooner; `--slow` unrolls them.
"""

import json
from functools import cache
from pathlib import Path

import pytest
import tolerances

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.runtime import LLM, SamplingParams

PROMPTS = Path(__file__).parents[2] / "benchmarks/workloads/peers64.jsonl"
WHOLE = BucketGrid(512, ((512, 1),), decode_slots=16)
CHUNKS = BucketGrid(512, ((512, 2, 64),), decode_slots=16)
TAILS = BucketGrid(512, ((512, 4, 8), (512, 2, 64)), decode_slots=16)


@cache
def answers(grid: BucketGrid, count: int, scan_layers: bool, max_tokens: int = 16):
    """Return the model's outputs for the first `count` conversations."""
    model = PlannedModel("smollm2", "", scan_layers)
    llm = LLM("smollm2", plan=Plan("cpu", model, Numbers("float32"), grid))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
    outputs = llm.chat(conversations_of(count), params)
    llm.close()
    return [output.outputs[0] for output in outputs]


def conversations_of(count: int) -> list:
    """Return the benchmark's conversations, and then the ends of the same conversations."""
    lines = PROMPTS.read_text("utf-8").splitlines()
    rows = [json.loads(line)["body"]["messages"] for line in lines]
    found = []
    for i in range(count):
        (message,) = rows[i % len(rows)]
        skipped = i // len(rows) * 150
        found.append([{"role": "user", "content": message["content"][skipped:]}])
    return found


@pytest.mark.parametrize(
    "grid", [pytest.param(CHUNKS, marks=pytest.mark.slow), TAILS], ids=["one size", "two sizes"]
)
@pytest.mark.parametrize("count", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_chunks_give_the_greedy_tokens_of_whole_prompts(count, grid, optimizes):
    whole, chunked = (answers(one, count, scan_layers=not optimizes) for one in (WHOLE, grid))
    for expected, got in zip(whole, chunked, strict=True):
        for step, score in enumerate(expected.logprobs):
            (_, best), (_, second) = score.top
            if best - second < tolerances.NEAR_TIE_GAP:
                break
            assert got.token_ids[step] == expected.token_ids[step]
