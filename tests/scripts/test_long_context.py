"""The cases of long contexts: predictions that can be calculated by hand."""

import pytest
from numerics_helpers import script

from noria.compile.abstract_model import AbstractModel

LONG = script("scripts/long_context.py")
PREFILL, DECODE = LONG.CASES
LAYER = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336
"""Number of weights in a layer of Llama 3 8B."""


def cost_model(case):
    return LONG.cost_model(case, AbstractModel(case.config))


def test_a_prefill_computes_products_and_half_of_all_pairs_of_tokens():
    tokens = 1 << 20
    operations = 32 * (2 * LAYER * tokens + 4 * 32 * 128 * tokens**2 / 2) + 2 * 4096 * 128256
    found = sum(part.flops for part in cost_model(PREFILL).work.parts(PREFILL.call))
    assert found == pytest.approx(operations / 128, rel=0.01)


def test_a_decode_step_waits_for_weights_and_cache():
    cost = cost_model(DECODE)
    kept = 80 * 2 * 16 * (1 << 17) * 8 * 128 * 2 // 64
    assert cost.work.page_bytes(DECODE.rows * DECODE.length) == kept
    estimate = cost.estimate(DECODE.call)
    assert estimate.binds == "memory"
    assert estimate.limits["memory"] > kept / 819e9


def test_a_prefill_sends_the_keys_and_values_of_the_ring_once_a_step():
    (sent,) = (part.sent for part in cost_model(PREFILL).work.parts(PREFILL.call) if part.sent)
    keys_and_values = 2 * ((1 << 20) // 16) * 128 * 2
    assert sent["collective-permute", ("sequence",)] == 32 * 15 * keys_and_values
