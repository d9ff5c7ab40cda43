"""Caches in codes: the answer of one device under all layouts, and rows that keep their bits.

The reference has the same cache on one device. A code may differ by one step from the reference's
where a value is near the middle between two, as layouts add in other orders.
"""

from collections import Counter
from functools import lru_cache

import numpy as np
import pytest
from laid_out import Answers, LaidOut, Row, config_of, greedy_rows, layout_of
from test_prefixes import PREFIXES, groups_of, rows_of
from tolerances import CODED_CACHE_LOGPROB

from noria.sharding.call import Call
from noria.sharding.communication import predict_collectives

INT8, FLOAT8, INT4 = "int8", "float8_e4m3fn", "int4"
CASES = [
    ("whole", "llama", "data-tensor", INT8),
    ("whole", "llama", "weight-stationary-1d", FLOAT8),
    ("whole", "gemma3_text", "sequence-parallel", INT8),
    ("whole", "gpt_oss", "v5p-slice", INT8),
    ("whole", "qwen3", "data-tensor-batch-attention", INT8),
    ("whole", "deepseek_v3", "ring-tensor", INT8),
    ("chunks", "gpt_oss", "ring", INT8),
    ("chunks", "qwen2", "ring@sequence=4", INT8),
    ("chunks", "gemma2", "ring-data-expert", FLOAT8),
    ("chunks", "llama4_text", "data-parallel", INT8),
    ("chunks", "deepseek_v3", "ring-tensor", INT8),
    ("chunks", "olmo2", "weight-stationary-1d-batch-attention", FLOAT8),
    ("whole", "llama", "weight-stationary-1d", INT4),
    ("chunks", "gpt_oss", "ring", INT4),
    ("prefixes", "gpt_oss", "weight-stationary-1d", INT8),
    ("prefixes", "deepseek_v3", "ring-tensor", INT8),
    ("prefixes", "qwen2", "data-tensor-batch-attention", INT8),
]
"""Pieces of prompts, family, layout and codes: sinks, windows, chunked attention, latents, and
caches that are split over slots, heads and entries, or go around rings."""
OFTEN = [("whole", "deepseek_v3", "ring-tensor", INT8)]
"""Cases of every run; the others are slow."""


@lru_cache(maxsize=4)
def coded(
    pieces: str, family: str, layout: str | None, codes: str | None, *, scan_layers: bool = False
) -> LaidOut:
    """Return a model with a cache in codes, compiled once for consecutive tests."""
    prefixes = PREFIXES if pieces == "prefixes" else None
    options = {"in_chunks": pieces != "whole", "prefixes": prefixes, "scan_layers": scan_layers}
    placed = layout and layout_of(layout)
    return LaidOut(config_of(family), placed, cache_codes=codes, **options)


def answer(model: LaidOut) -> Answers:
    if model.prefixes is None:
        return model.answer(greedy_rows())
    return model.answer(rows_of(model), groups=groups_of(model))


def assert_close(got: Answers, wanted: Answers, rows: list[int]) -> None:
    np.testing.assert_array_equal(got.output.tokens_BQ[rows], wanted.output.tokens_BQ[rows])
    for name in ("prompt_logprobs_BV", "logprobs_BV"):
        ours, theirs = getattr(got, name)[rows], getattr(wanted, name)[rows]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=CODED_CACHE_LOGPROB)


@pytest.mark.parametrize(
    ("pieces", "family", "layout", "codes"),
    [pytest.param(*c, marks=[] if c in OFTEN else [pytest.mark.slow]) for c in CASES],
)
def test_the_answer_is_that_of_one_device(pieces, family, layout, codes):
    wanted, got = coded(pieces, family, None, codes), coded(pieces, family, layout, codes)
    rows = greedy_rows() if got.prefixes is None else rows_of(got)
    assert_close(answer(got), answer(wanted), list(rows))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "deepseek_v3"])
def test_scanned_layers_give_the_answer_of_unrolled_ones(family):
    wanted, got = (coded("whole", family, None, INT8, scan_layers=x) for x in (False, True))
    assert_close(answer(got), answer(wanted), list(greedy_rows()))


@pytest.mark.usefixtures("optimized")
def test_a_row_keeps_its_bits_in_another_slot_and_without_neighbours():
    """Layers have windows and sinks, and prompts come in chunks of two sizes."""
    model, rows = coded("chunks", "gpt_oss", None, INT4), greedy_rows()
    together = model.answer(rows)
    last = model.grid.decode_slots - 1
    moved = model.answer({last - slot: row for slot, row in rows.items()})
    alone = model.answer({5: rows[2]})
    for name in ("prompt_logprobs_BV", "logprobs_BV"):
        wanted = getattr(together, name)
        for slot in rows:
            np.testing.assert_array_equal(getattr(moved, name)[last - slot], wanted[slot])
        np.testing.assert_array_equal(getattr(alone, name)[5], wanted[2])


@pytest.mark.slow
@pytest.mark.usefixtures("optimized")
def test_a_copied_beginning_has_the_bits_of_one_that_is_computed():
    model = coded("chunks", "gemma3_text", None, INT8)
    row = next(row for row in greedy_rows().values() if len(row.prompt) > 16)
    computed = model.answer({3: row})
    state, _ = model.prefill({1: Row(row.prompt[:16], limit=16)})
    state, _ = model.prefill({3: row}, model.fork(state, 1, 3, row), start=16)
    copied = model.decode(state, [3])
    np.testing.assert_array_equal(copied.logprobs_BV[3], computed.logprobs_BV[3])


def test_entries_are_predicted_to_be_sent_as_codes_and_scales():
    """Every device gets the entries of all whole prompts, which may belong to any slot."""
    config, layout = config_of("qwen2"), layout_of("data-parallel")
    call = Call("prefill", 8, 8, 8)
    found = predict_collectives(config, layout, call, 4, cache_codes=INT8)
    sent = Counter[int]()
    for one in found:
        if one.kind == "all-gather":
            sent[one.num_bytes] += one.times
    # keys and values of 64 tokens, with eight heads of eight features, in two layers
    codes, scales = 64 * 8 * 8, 64 * 8 * 4
    assert {n: sent[n] for n in (codes, scales)} == {codes: 2 * 2, scales: 2 * 2}
