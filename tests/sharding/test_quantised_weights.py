"""Models with weights in codes give the answer of their dequantised weights, under all layouts.

The reference has float weights with the values of codes times scales, on one device.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from laid_out import LAYOUTS, LaidOut, config_of, expected, greedy_rows, layout_of
from tolerances import INT8_ACTIVATIONS_LOGPROB

from noria.compile.abstract_model import AbstractModel, model_sizes
from noria.compile.weight_rules import WeightRules
from noria.modelzoo.weights.weight_formats import WeightFormat
from noria.sharding.call import Call
from noria.sharding.communication import predict_collectives
from noria.sharding.legality import check

INT8, FLOAT8 = WeightFormat("int8"), WeightFormat("float8_e4m3fn")
EVERYTHING = ("*.table", "*.router", "*.shared_gate")
"""Patterns of weights that are float by default."""
ON_ONE_DEVICE = (
    ("llama", INT8),
    ("qwen3", FLOAT8),
    ("gemma3_text", WeightFormat("int4", group=8)),
    ("qwen2_moe", WeightFormat("int4", group=8)),
    ("deepseek_v3", INT8),
    ("deepseek_v3", WeightFormat("int4", group=2)),
    ("cohere", WeightFormat("int8", group=24)),
    ("gpt_oss", INT8),
    ("llama4_text", INT8),
)
ALONE_WITH_SLOW = {"llama", "qwen2_moe"}
"""Families with codes on one device only in slow runs: others have their formats there, and every
run has them with codes of all weights, or under layouts."""
OFTEN = {
    ("weight-stationary-1d", "int8"),
    ("weight-stationary-2d", "int4"),
    ("weight-gathered", "float8_e4m3fn"),
    ("expert-tensor", "int4"),
}
"""Layouts and codes of every run; the others are slow. Latents with codes are on a ring."""


def rules_of(form: WeightFormat, patterns: tuple[str, ...] = ()) -> WeightRules:
    return WeightRules(form, tuple((pattern, form) for pattern in patterns))


def assert_answers(family: str, layout: str | None, rules: WeightRules, **options) -> None:
    """Compare greedy ids, and log-probabilities after the prompt and after the last token."""
    config = config_of(family, **options)
    laid = LaidOut(config, layout and layout_of(layout), weight_rules=rules)
    wanted = expected(config, weight_rules=rules)
    wanted.assert_equals(laid.answer(greedy_rows()), greedy_rows())


@pytest.mark.parametrize(
    ("family", "form"),
    [
        pytest.param(*pair, marks=[pytest.mark.slow] * (pair[0] in ALONE_WITH_SLOW))
        for pair in ON_ONE_DEVICE
    ],
)
def test_codes_give_the_answer_of_their_values(family, form):
    assert_answers(family, None, rules_of(form))


def test_every_weight_can_be_quantised():
    assert_answers("qwen2_moe", None, rules_of(INT8, EVERYTHING))


def test_scanned_layers_take_codes():
    config = config_of("qwen3_moe", num_layers=3)
    rules = rules_of(WeightFormat("int4", group=8))
    laid = LaidOut(config, scan_layers=True, weight_rules=rules)
    wanted = expected(config, weight_rules=rules)
    wanted.assert_equals(laid.answer(greedy_rows()), greedy_rows())


@pytest.mark.parametrize(
    ("layout", "codes"),
    [
        pytest.param(*pair, marks=[] if pair in OFTEN else [pytest.mark.slow])
        for pair in product(LAYOUTS, ("int8", "float8_e4m3fn", "int4"))
    ],
)
def test_the_answer_is_that_of_one_device(layout, codes):
    """Codes of int4 are in groups as large as the part of a weight on one device allows."""
    family, group = ("qwen3_moe", 4) if "expert" in layout else ("llama", 3)
    form = WeightFormat(codes, group if codes == "int4" else 0)
    rules, placed = rules_of(form, ("*.table",)), layout_of(layout)
    sizes = model_sizes(config_of(family), placed.mesh.num_devices, weight_rules=rules)
    assert not check(placed, sizes)
    assert_answers(family, layout, rules)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("llama", "weight-stationary-2d", marks=pytest.mark.slow),
        pytest.param("qwen2", "embed-parallel", marks=pytest.mark.slow),
        pytest.param("qwen3", "ring-tensor", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "expert-tensor", marks=pytest.mark.slow),
        pytest.param("gemma3_text", "weight-gathered", marks=pytest.mark.slow),
        ("deepseek_v3", "weight-stationary-1d"),
    ],
)
def test_int8_activations_give_the_answer_of_one_device(family, layout):
    """A token has the same scale on all devices that have a part of its features."""
    rules = replace(rules_of(INT8), rounds_activations=True)
    config, rows = config_of(family), greedy_rows()
    one, laid = (
        LaidOut(config, placed, weight_rules=rules).answer(rows)
        for placed in (None, layout_of(layout))
    )
    slots = list(rows)
    np.testing.assert_array_equal(laid.output.tokens_BQ[slots], one.output.tokens_BQ[slots])
    for name in ("prompt_logprobs_BV", "logprobs_BV"):
        got, wanted = getattr(laid, name)[slots], getattr(one, name)[slots]
        np.testing.assert_allclose(got, wanted, rtol=0, atol=INT8_ACTIVATIONS_LOGPROB)


@pytest.mark.usefixtures("optimized")
def test_rows_with_int8_activations_keep_their_bits_in_other_slots():
    rules = replace(rules_of(INT8), rounds_activations=True)
    model, rows = LaidOut(config_of("llama"), weight_rules=rules), greedy_rows()
    last = model.grid.decode_slots - 1
    together = model.answer(rows)
    moved = model.answer({last - slot: row for slot, row in rows.items()})
    for name in ("prompt_logprobs_BV", "logprobs_BV"):
        for slot in rows:
            got, wanted = getattr(moved, name)[last - slot], getattr(together, name)[slot]
            np.testing.assert_array_equal(got, wanted)


def test_latents_take_codes_under_a_layout():
    assert_answers("deepseek_v3", "ring-tensor", rules_of(INT8))


def test_a_group_on_two_devices_is_refused_by_name():
    rules, layout = rules_of(WeightFormat("int4", group=24)), layout_of("weight-stationary-1d")
    sizes = model_sizes(config_of("llama"), layout.mesh.num_devices, weight_rules=rules)
    findings = check(layout, sizes)
    assert any("layers.0.mlp.down" in finding and "3" in finding for finding in findings), findings
    assert all("numbers.group" in finding for finding in findings)


def test_gathered_weights_are_predicted_to_be_sent_as_codes_and_scales():
    config, layout = config_of("llama"), layout_of("weight-gathered-all")
    call, itemsize = Call("prefill", 8, 24, 24), 4

    def gathered_bytes(rules: WeightRules) -> int:
        element_bytes = AbstractModel(config, weight_rules=rules).element_bytes("float32")
        found = predict_collectives(config, layout, call, itemsize, element_bytes)
        return sum(x.times * x.num_bytes for x in found if x.kind == "all-gather")

    by_itemsize = predict_collectives(config, layout, call, itemsize)
    whole = sum(x.times * x.num_bytes for x in by_itemsize if x.kind == "all-gather")
    assert gathered_bytes(WeightRules()) == whole
    assert gathered_bytes(rules_of(INT8)) < 0.6 * whole
