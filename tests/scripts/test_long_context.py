"""The roofline of long contexts: predictions that can be worked out by hand."""

from dataclasses import replace

import pytest
from numerics_helpers import script

LONG = script("scripts/long_context.py")
PREFILL, DECODE = LONG.CASES
LAYER = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336
"""Weights of a layer of Llama 3 8B."""


def test_a_prefill_computes_products_and_half_of_all_pairs_of_tokens():
    tokens = 1 << 20
    operations = 32 * (2 * LAYER * tokens + 4 * 32 * 128 * tokens**2 / 2) + 2 * 4096 * 128256
    seconds = LONG.predict(PREFILL, weights=0, kept=0, collectives=[])
    assert seconds["compute"] == pytest.approx(operations / 128 / 459e12)
    half = LONG.predict(replace(PREFILL, length=tokens // 2), 0, 0, [])
    assert 3 < seconds["compute"] / half["compute"] < 4


def test_a_decode_step_reads_weights_and_cache_once():
    sent = [{"sent_bytes": 5e9}, {"sent_bytes": 15e9}]
    seconds = LONG.predict(DECODE, weights=2 * 819e9, kept=1 * 819e9, collectives=sent)
    assert seconds["memory"] == pytest.approx(3)
    assert seconds["links"] == pytest.approx(20e9 / 50e9)
    assert seconds["overlapped"] == seconds["memory"]
    assert LONG.kept_bytes(DECODE) == 80 * 2 * 16 * (1 << 17) * 8 * 128 * 2 // 64


def test_a_prefill_sends_the_keys_and_values_of_the_ring_once_a_step():
    found = {one["kind"]: one for one in LONG.collectives_of(PREFILL, None)}
    permutes = found["collective-permute"]
    assert permutes["count"] == 32 * 2 * 15
    assert permutes["sent_bytes"] == 32 * 15 * 2 * ((1 << 20) // 16) * 128 * 2
