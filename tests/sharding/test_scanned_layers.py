"""Scanned layers give the answer of unrolled layers, also under layouts.

The families have layers of one kind, of two alternating kinds, or other layers around the loop.
"""

import numpy as np
import pytest
from laid_out import LaidOut, config_of, expected, greedy_rows, layout_of

NUM_LAYERS = {"gemma2": 5, "deepseek_v3": 4, "gpt_oss": 4, "llama4_text": 4}
"""Number of layers by family; 3 for other families."""
PAIRS = [
    ("llama", None, True),
    ("gemma2", None, False),
    ("deepseek_v3", None, False),
    ("qwen3_moe", None, False),
    ("llama", "weight-stationary-2d", True),
    ("gemma2", "v5e-host", True),
    ("qwen3_moe", "expert-tensor", True),
    ("deepseek_v3", "expert-tensor", True),
    ("gpt_oss", "expert-parallel", False),
    ("llama4_text", "ring", False),
    ("deepseek_v2", "ring-tensor", False),
    ("llama", "weight-stationary-1d-batch-attention", False),
    ("mistral", "weight-gathered-all", False),
]


def config(family: str):
    return config_of(family, num_layers=NUM_LAYERS.get(family, 3))


def assert_answers_as_unrolled(family: str, laid: LaidOut) -> None:
    """Check log-probabilities after the prompt and after twelve tokens, and equality of ids."""
    assert any(":" in name for name in laid.parameters)
    expected(config(family)).assert_equals(laid.answer(greedy_rows()), greedy_rows())


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(*pair, marks=[] if is_often else [pytest.mark.slow])
        for *pair, is_often in PAIRS
    ],
)
def test_scanned_layers_give_the_answer_of_unrolled_ones(family, layout):
    laid = LaidOut(config(family), layout and layout_of(layout), scan_layers=True)
    assert_answers_as_unrolled(family, laid)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("gemma2", None),
        pytest.param("deepseek_v3", None, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "expert-tensor", marks=pytest.mark.slow),
        ("llama4_text", "ring"),
        pytest.param("gemma2", "v5e-host", marks=pytest.mark.slow),
        pytest.param("llama", "weight-stationary-1d-batch-attention", marks=pytest.mark.slow),
    ],
)
def test_scanned_layers_take_chunks(family, layout):
    """The reference has unrolled layers and reads prompts whole."""
    placed = layout and layout_of(layout)
    laid = LaidOut(config(family), placed, scan_layers=True, in_chunks=True)
    assert_answers_as_unrolled(family, laid)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "llama4_text"])
def test_experts_are_reported_by_layers_in_order(family):
    """The counts of every sparse layer are compared; they differ between layers."""
    found = (
        LaidOut(config(family), scan_layers=is_scanned).prefill(greedy_rows())[1]
        for is_scanned in (False, True)
    )
    (expected,), (got,) = ([output.experts for output in outputs] for outputs in found)
    load_LSE = np.asarray(expected.use.load_SE)
    assert len({layer_SE.tobytes() for layer_SE in load_LSE}) == len(load_LSE) > 1
    np.testing.assert_array_equal(np.asarray(got.use.load_SE), load_LSE)
    np.testing.assert_array_equal(np.asarray(got.num_dropped_B), np.asarray(expected.num_dropped_B))
