"""Slots of several lengths give the answer of one device, bit for bit, also under layouts."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from laid_out import FAMILY_OF, LaidOut, config_of, expected, greedy_rows, layout_of
from test_rows_under_layouts import filled_with_nan
from unoptimized import set_optimized

from noria.compile.abstract_model import model_sizes
from noria.runtime.request import SamplingParams
from noria.sharding.legality import check

CASES = pytest.mark.parametrize(
    ("layout", "family", "long_slots"),
    [
        (None, "gemma2", 3),
        pytest.param("weight-stationary-1d", "mistral", 3, marks=pytest.mark.slow),
        ("data-tensor@data=4,tensor=2", "llama", 4),
        pytest.param(
            "data-tensor-batch-attention@data=2,tensor=2", "qwen3", 4, marks=pytest.mark.slow
        ),
        pytest.param("ring-tensor", FAMILY_OF["ring-tensor"], 3, marks=pytest.mark.slow),
    ],
)
"""Windows in one or more cache segments, rows on one or several devices, and stripes."""
OPTIMIZED = {None, "data-tensor-batch-attention@data=2,tensor=2"}
"""Layouts with optimized programs in every run. The others have them with `--slow`."""


@pytest.fixture(autouse=True)
def _optimizations(request: pytest.FixtureRequest, optimizes: bool) -> None:
    case = getattr(request.node, "callspec", None)
    set_optimized(optimizes or (case is not None and case.params["layout"] in OPTIMIZED))


@cache
def ragged_under(layout: str | None, family: str, long_slots: int) -> LaidOut:
    """Return a model with ragged slots, compiled once for all tests."""
    placed = None if layout is None else layout_of(layout)
    return LaidOut(config_of(family), placed, long_slots)


def rows_of(under: LaidOut) -> dict:
    """Return rows that fit their slots; prompts have at most the first span's length."""
    return {
        slot: replace(row, limit=under.grid.slot_capacity(slot))
        for slot, row in greedy_rows().items()
    }


def assert_answers(ragged: LaidOut) -> None:
    """Compare with one device; some rows end where their slots do."""
    rows = rows_of(ragged)
    assert len({row.limit for row in rows.values()}) == 2
    expected(ragged.config, tuple(rows.values())).assert_equals(ragged.answer(rows), rows)


@CASES
def test_ragged_slots_change_no_answer(layout, family, long_slots):
    assert_answers(ragged_under(layout, family, long_slots))


@CASES
def test_long_and_short_slots_give_a_row_the_same_bits(layout, family, long_slots):
    ragged = ragged_under(layout, family, long_slots)
    grid = ragged.grid
    long, short = (
        next(slot for slot in range(6) if grid.slot_capacity(slot) == span)
        for span in grid.decode_spans[::-1]
    )
    row = replace(greedy_rows()[4], limit=grid.decode_spans[0])
    cleared = ragged.clear(filled_with_nan(ragged), short)
    got, other = ragged.answer({long: row}), ragged.answer({short: row}, cleared)
    assert (got.output.tokens_BQ[long] >= 0).sum() == 12
    np.testing.assert_array_equal(got.output.tokens_BQ[long], other.output.tokens_BQ[short])
    np.testing.assert_array_equal(got.logprobs_BV[long], other.logprobs_BV[short])


@CASES
def test_samples_of_a_prompt_are_forked_into_slots_of_any_length(layout, family, long_slots):
    """Each sample has the bits of a separate prompt, from long slots to short slots and back."""
    ragged = ragged_under(layout, family, long_slots)
    grid = ragged.grid
    sampled = SamplingParams(temperature=2.0, ignore_eos=True)
    row = replace(greedy_rows()[4], params=sampled, limit=grid.decode_spans[0])
    rows = {slot: replace(row, sample=slot) for slot in range(grid.decode_slots)}
    state, _ = ragged.prefill({0: rows[0]})
    order = [*reversed(rows)]
    for source, slot in pairwise([0, *order[:-1]]):
        state = ragged.fork(state, source, slot, rows[slot])
    got, expected = ragged.decode(state, rows), ragged.answer(rows)
    np.testing.assert_array_equal(got.output.tokens_BQ, expected.output.tokens_BQ)
    np.testing.assert_array_equal(got.logprobs_BV, expected.logprobs_BV)
    assert len(set(map(tuple, got.output.tokens_BQ.tolist()))) == len(rows)


def test_chunks_in_ragged_slots_change_no_answer():
    """Every device has long and short slots, and rows use both."""
    layout = layout_of("data-tensor@data=4,tensor=2")
    assert_answers(LaidOut(config_of("llama"), layout, long_slots=4, in_chunks=True))


def test_groups_that_are_not_those_of_the_layout_are_refused():
    ragged = ragged_under("data-tensor@data=4,tensor=2", "llama", 4)
    wrong = replace(ragged.grid, slot_groups=2)
    sizes = model_sizes(ragged.config, 8, wrong)
    (finding,) = check(ragged.layout, sizes)
    assert (
        "expected buckets.slot_groups to be the pieces that it splits slots into, 4, got 2"
        in finding
    )
