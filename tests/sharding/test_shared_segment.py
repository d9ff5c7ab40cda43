"""A prefix that all slots share is kept once, is read by all, and changes no answer."""

from functools import cache

import numpy as np
import pytest
from laid_out import VOCAB, LaidOut, Row, config_of, expected, layout_of

from noria.compile.steps import DecodeState
from noria.modelzoo.segments import split_shared

SHARED = 16
"""Number of tokens in the common prefix, which is the first segment."""
CASES = pytest.mark.parametrize(
    ("family", "layout", "scan_layers"),
    [
        ("llama", None, True),
        ("gemma2", None, False),
        ("gpt_oss", "weight-stationary-1d", False),
        ("deepseek_v3", "ring-tensor", False),
    ],
)
"""Cases: scanned layers; rolling layers; split sinks and heads; split latents and entries."""


def prompts() -> dict[int, Row]:
    """Return prompts of 17 to 24 tokens by slot; the first 16 tokens are equal."""
    rng = np.random.default_rng(1)
    beginning, *ends = (rng.integers(3, VOCAB, n).tolist() for n in (SHARED, 1, 8, 5, 2, 7, 3))
    return {slot: Row((*beginning, *end)) for slot, end in enumerate(ends)}


@cache
def shared_under(family: str, layout: str | None, scan_layers: bool) -> LaidOut:
    """Return a model whose slots share the first segment, compiled once for all tests."""
    placed = None if layout is None else layout_of(layout)
    return LaidOut(
        config_of(family), placed, scan_layers=scan_layers, in_chunks=True, shares_first_span=True
    )


def prefilled(shared: LaidOut) -> DecodeState:
    """Prefill the prompts into their slots, with the prefix only once, in the first slot."""
    rows = prompts()
    beginning = Row(rows[0].prompt[:SHARED])
    state, _ = shared.prefill({0: beginning})
    for slot in list(rows)[1:]:
        state = shared.fork(state, 0, slot, beginning)
    state, _ = shared.prefill(rows, state, start=SHARED)
    return state


def shared_arrays(state: DecodeState) -> list[np.ndarray]:
    """Return the positions and all layers' arrays of the shared segment."""
    layers = [s for kept in state.cache.layers for s in kept if isinstance(s, tuple)]
    segments = [(state.cache.positions.whole_BS, 0), *((segments, 1) for segments in layers)]
    # copy the arrays, as decode donates the buffers
    return [np.array(x) for segments, axis in segments for x in split_shared(segments, axis)[0]]


@CASES
def test_a_shared_beginning_changes_no_answer(family, layout, scan_layers):
    shared, rows = shared_under(family, layout, scan_layers), prompts()
    got = shared.decode(prefilled(shared), rows)
    expected(shared.config, tuple(rows.values())).assert_equals(got, rows)


@CASES
def test_a_shared_segment_has_one_row_that_stays_as_it_is(family, layout, scan_layers):
    shared = shared_under(family, layout, scan_layers)
    state = prefilled(shared)
    before = shared_arrays(state)
    assert len(before) > 1 and all(1 in x.shape[:2] for x in before)
    np.testing.assert_array_equal(np.sort(before[0]), np.arange(SHARED)[None])
    after = shared_arrays(shared.decode(state, prompts()).state)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
