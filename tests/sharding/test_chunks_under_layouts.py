"""Prompts in chunks under layouts give the answer of whole prompts on one device.

A row of a chunk call and its slot may lie on different devices: slots are taken from the last one
on, and chunks of two sizes are longer and shorter than the windows.
"""

from dataclasses import dataclass, replace
from functools import cached_property

import jax
import numpy as np
import pytest
from laid_out import Answers, LaidOut, Row, config_of, greedy_rows, laid_out, layout_of
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.bucket_grid import BucketGrid, PrefillBucket
from noria.compile.compiled_graphs import CompiledGraphs
from noria.compile.steps import DecodeState, Prompts, prefill_step
from noria.modelzoo.chunk_cache import ChunkRows
from noria.runtime.padding import pack_prompts, pack_sampling


@dataclass
class InChunks(LaidOut):
    """One model under one layout whose prompts are poured into their slots."""

    @property
    def grid(self) -> BucketGrid:
        n = super().grid.decode_slots
        chunks = ((16, n, 8), (16, n, 16), (32, n, 8), (32, n, 16))
        return BucketGrid(40, chunks, n, (16, 32, 40), steps_per_call=4)

    @cached_property
    def graphs(self) -> CompiledGraphs:
        span = self.grid.decode_spans[-1]
        return self.compile("empty", "open", "fork", "chunk", CompiledGraphs.decode_name(span))

    def answer_in_chunks(self, rows: dict[int, Row]) -> Answers:
        """Each row in the slot of its number, counted from the last."""
        state, last = self.pour(rows), self.grid.decode_slots - 1
        poured = Prompts((), np.asarray(state.logits_BV), state.tokens_BS, state.length_B)
        return self.decode(poured, state, {last - number: row for number, row in rows.items()})

    def pour(self, rows: dict[int, Row]) -> DecodeState:
        """Slots with whole prompts."""
        last, state = self.grid.decode_slots - 1, self.empty_state()
        for number, row in rows.items():
            state = self._open(state, last - number, row)
        poured = dict.fromkeys(rows, 0)
        while left := [n for n in rows if poured[n] < len(rows[n].prompt)]:
            buckets = {n: self.grid.bucket_of(len(rows[n].prompt), poured[n]) for n in left}
            bucket = buckets[left[0]]
            together = {n: poured[n] for n in left if buckets[n] == bucket}
            state = self._pour(state, rows, bucket, together)
            poured |= {n: start + bucket.tokens for n, start in together.items()}
        return state

    def _open(self, state: DecodeState, slot: int, row: Row) -> DecodeState:
        sampling = pack_sampling(
            row.params,
            seed=row.seed,
            sample=0,
            prompt_length=len(row.prompt),
            stop_ids=(),
            vocab_size=self.definition.padded_vocab,
        )
        lengths = (np.array([n], np.int32) for n in (len(row.prompt), self.grid.max_length))
        return self.graphs.open(state, *self.put((np.int32(slot), *lengths, sampling)))

    def _pour(
        self,
        state: DecodeState,
        rows: dict[int, Row],
        bucket: PrefillBucket,
        together: dict[int, int],
    ) -> DecodeState:
        """A piece more of some rows, each from its own position on."""
        B = self.grid.decode_slots
        tokens_BT = np.zeros((bucket.batch, bucket.tokens), np.int32)
        slot_B, start_B, count_B = (np.zeros(B, np.int32) for _ in range(3))
        slot_B[:] = B
        for number, start in together.items():
            piece = rows[number].prompt[start : start + bucket.tokens]
            tokens_BT[number, : len(piece)], count_B[number] = piece, len(piece)
            slot_B[number], start_B[number] = B - 1 - number, start
        of_rows = ChunkRows._make((slot_B, start_B, count_B))
        arguments = self.put((of_rows, tokens_BT))
        state, _ = self.graphs.chunk(self.parameters, state, bucket, *arguments)
        return state


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
    ("mistral", "weight-gathered", 8),
    ("gpt_oss", "ring", 8),
    ("gemma3_text", "ring@sequence=2", 8),
    ("qwen2", "ring-contiguous@sequence=4", 8),
    ("llama", "ring-tensor", 8),
    ("deepseek_v3", "ring-tensor", 8),
    ("gemma2", "ring-data-expert", 8),
    ("llama4_text", "ring-data-expert", 8),
]
OFTEN = [("gpt_oss", "v5p-slice", 8), ("qwen2", "ring-contiguous@sequence=4", 8)]
"""Rows, heads and experts over two axes, other rules for decode, windows and sinks; a ring, whose
devices send entries of the first span and of windows, and queries beside the second span."""


@pytest.mark.parametrize(
    ("family", "layout", "num_kv_heads"),
    [pytest.param(*pair, marks=[] if pair in OFTEN else [pytest.mark.slow]) for pair in PAIRS],
)
def test_chunks_give_the_answer_of_whole_prompts_on_one_device(family, layout, num_kv_heads):
    rows = greedy_rows()
    slots = list(rows)
    expected = laid_out(family, None, num_kv_heads).answer(rows)
    laid = None if layout is None else layout_of(layout)
    got = InChunks(config_of(family, num_kv_heads), laid).answer_in_chunks(rows)
    assert (got.output.tokens_BQ[::-1][slots] == expected.output.tokens_BQ[slots]).all()
    for name in ("prompt_logprobs_BV", "logprobs_BV"):
        np.testing.assert_allclose(
            getattr(got, name)[::-1][slots],
            getattr(expected, name)[slots],
            rtol=0,
            atol=FLOAT32_MODEL_LOGPROB,
        )


LONG = 8192


@dataclass
class InLongChunks(InChunks):
    """The same for long prompts."""

    @property
    def grid(self) -> BucketGrid:
        return BucketGrid(LONG, ((2048, 2, 512), (LONG, 2, 512)), 2, (2048, LONG))


@pytest.mark.slow
def test_chunks_of_long_prompts_on_a_ring_give_the_answer_of_whole_ones_on_one_device():
    """Windows and layers without; one prompt fills the longest span, one ends within it."""
    config = replace(config_of("gemma3_text"), max_position=LONG)
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(3, config.vocab_size, n).tolist()) for n in (LONG, 5000)]
    poured = InLongChunks(config, layout_of("ring")).pour(dict(enumerate(map(Row, prompts))))
    one = LaidOut(config)
    tokens = one.put(pack_prompts(prompts, PrefillBucket(LONG, 2)))
    decoder = one.definition.bind
    whole = jax.jit(lambda parameters, *tokens: prefill_step(decoder(parameters), *tokens))
    expected_BV = whole(one.parameters, *tokens).logits_BV
    got, expected = (
        jax.nn.log_softmax(np.asarray(x)[:, : config.vocab_size])
        for x in (poured.logits_BV, expected_BV)
    )
    np.testing.assert_allclose(got[::-1], expected, rtol=0, atol=FLOAT32_MODEL_LOGPROB)
