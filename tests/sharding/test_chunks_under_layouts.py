"""Prompts in chunks under layouts give the answer of whole prompts on one device.

A row of a call and its slot may lie on different devices: rows take slots from the last slot
downwards. Of two chunk sizes, one is longer and one is shorter than the windows.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import numpy as np
import pytest
from laid_out import LaidOut, Row, config_of, expected, greedy_rows, layout_of
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.graphs.prefill_steps import last_hidden
from noria.compile.grids.bucket_grid import BucketGrid

PAIRS = [
    ("llama", None, 8),
    ("qwen2", "data-tensor", 8),
    ("gpt_oss", "v5p-slice", 8),
    ("olmo2", "v5p-slice", 1),
    ("mixtral", "expert-parallel", 8),
    ("deepseek_v2", "data-tensor", 8),
    ("llama4_text", "data-parallel", 8),
    ("gemma3_text", "sequence-parallel", 8),
    ("qwen3", "data-tensor-batch-attention", 8),
    ("olmo2", "weight-stationary-1d-batch-attention", 2),
    ("olmo2", "weight-stationary-1d@tensor=8", 1),
    ("deepseek_v3", "weight-stationary-1d@tensor=4", 8),
    ("mixtral", "weight-stationary-1d-batch-attention", 8),
    ("gpt_oss", "weight-stationary-1d@tensor=2", 8),
    ("mistral", "weight-gathered", 8),
    ("gpt_oss", "ring", 8),
    ("gemma3_text", "ring@sequence=2", 8),
    ("qwen2", "ring@sequence=4", 8),
    ("llama", "ring-tensor", 8),
    ("deepseek_v3", "ring-tensor", 8),
    ("gemma2", "ring-data-expert", 8),
    ("llama4_text", "ring-data-expert", 8),
]
OFTEN = [("gpt_oss", "v5p-slice", 8), ("qwen2", "ring@sequence=4", 8)]
"""Pairs of every run. The first has rows, heads and experts over two axes, other rules for decode,
windows and sinks. The second is a ring: its devices send queries, or the entries of windows."""


EVERY_PAIR = pytest.mark.parametrize(
    ("family", "layout", "num_kv_heads"),
    [pytest.param(*pair, marks=[] if pair in OFTEN else [pytest.mark.slow]) for pair in PAIRS],
)


@lru_cache(maxsize=len(OFTEN))
def in_chunks(family: str, layout: str | None, num_kv_heads: int) -> LaidOut:
    """Return a model under a layout, compiled once for the tests of a pair."""
    placed = None if layout is None else layout_of(layout)
    return LaidOut(config_of(family, num_kv_heads), placed, in_chunks=True)


@EVERY_PAIR
def test_chunks_give_the_answer_of_whole_prompts_on_one_device(family, layout, num_kv_heads):
    config, rows = config_of(family, num_kv_heads), greedy_rows()
    model = in_chunks(family, layout, num_kv_heads)
    slots = [model.grid.decode_slots - 1 - slot for slot in rows]
    got = model.answer(dict(zip(slots, rows.values(), strict=True)))
    expected(config).assert_equals(got, slots)


@EVERY_PAIR
def test_a_prompt_after_a_copied_prefix_has_the_bits_of_one_that_is_computed_whole(
    family, layout, num_kv_heads
):
    """Other rows decode between the prefix and its copy, and go on in their own slots."""
    model = in_chunks(family, layout, num_kv_heads)
    row, *others = greedy_rows().values()
    neighbours = dict(enumerate(others[:4]))
    last = model.grid.decode_slots - 1
    computed = model.answer({last: row} | neighbours)

    prefix = replace(row, prompt=row.prompt[:16], limit=16)
    state, _ = model.prefill({last - 1: prefix} | neighbours)
    state = model.decode(state, neighbours, num_calls=1).state
    state = model.fork(state, last - 1, last, row)
    state, _ = model.prefill({last: row}, state, start=16)
    copied = model.decode(state, [last])
    for got, wanted in (
        (copied.output.tokens_BQ, computed.output.tokens_BQ),
        (copied.prompt_logprobs_BV, computed.prompt_logprobs_BV),
        (copied.logprobs_BV, computed.logprobs_BV),
    ):
        np.testing.assert_array_equal(got[last], wanted[last])


LONG = 8192


@dataclass
class InLongChunks(LaidOut):
    """One model under one layout, for long prompts."""

    @property
    def grid(self) -> BucketGrid:
        return BucketGrid(LONG, ((LONG, 2, 512),), 2)


@pytest.mark.slow
def test_chunks_of_long_prompts_on_a_ring_give_the_answer_of_whole_ones_on_one_device():
    """Some layers have windows; one prompt fills its slot, another ends within a page."""
    config = replace(config_of("gemma3_text"), max_position=LONG)
    rng = np.random.default_rng(0)
    lengths = np.array([LONG, 5000], np.int32)
    prompts = [tuple(rng.integers(3, config.vocab_size, n).tolist()) for n in lengths]
    state, _ = InLongChunks(config, layout_of("ring")).prefill(dict(enumerate(map(Row, prompts))))
    one = LaidOut(config)
    tokens_BT = np.zeros((2, LONG), np.int32)
    for row, prompt in zip(tokens_BT, prompts, strict=True):
        row[: len(prompt)] = prompt

    @jax.jit
    def whole(parameters, tokens_BT, length_B):
        decoder = one.definition.bind(parameters)
        x_BTD, _ = decoder.forward(tokens_BT, length_B)
        return decoder.logits(last_hidden(decoder, x_BTD, length_B))

    expected_BV = whole(one.parameters, *one.put((tokens_BT, lengths)))
    got, expected = (
        jax.nn.log_softmax(np.asarray(x)[:, : config.vocab_size])
        for x in (state.logits_BV, expected_BV)
    )
    np.testing.assert_allclose(got, expected, rtol=0, atol=FLOAT32_MODEL_LOGPROB)
