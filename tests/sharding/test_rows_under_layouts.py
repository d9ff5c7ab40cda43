"""Within one layout a row's bits depend only on the row, not on its slot, or on neighbours or NaN.

The slots lie on different devices, and their communication must not carry values of other rows.
"""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laid_out import FAMILY_OF, PROMPT_LENGTHS, VOCAB, Answers, LaidOut, Row, greedy_rows, laid_out
from unoptimized import set_optimized

from noria.compile.graphs.steps import NO_TOKEN, DecodeState
from noria.modelzoo.cache.layer_state import LayerState
from noria.runtime.request import SamplingParams

LAYOUTS = pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(
            FAMILY_OF[layout], layout, marks=[pytest.mark.slow] * (layout == "data-parallel")
        )
        for layout in ("data-parallel", "data-tensor-batch-attention", "v5p-slice")
    ],
)
ORDER = (5, 2, 7, 0, 1, 4)
"""Another order of the rows' slots, with other free slots."""


def rows() -> dict[int, Row]:
    """Return rows of every length; every second row is sampled."""
    sampled = SamplingParams(temperature=2.0, top_p=0.9)
    return {
        slot: Row(row.prompt, sampled, seed=slot) if slot % 2 else row
        for slot, row in greedy_rows().items()
    }


OPTIMIZED = "data-tensor-batch-attention"
"""The layout with optimized programs in every run. The others have them with `--slow`."""


@pytest.fixture(autouse=True)
def _optimizations(request: pytest.FixtureRequest, optimizes: bool) -> None:
    case = getattr(request.node, "callspec", None)
    set_optimized(optimizes or (case is not None and case.params["layout"] == OPTIMIZED))


@cache
def answers(family: str, layout: str) -> Answers:
    return laid_out(family, layout).answer(rows())


def bits(answer: Answers, slot: int) -> tuple[np.ndarray, ...]:
    """Return all results of a row."""
    return (
        answer.output.tokens_BQ[slot],
        answer.prompt_logprobs_BV[slot],
        np.asarray(answer.state.logits_BV)[slot],
    )


def assert_same_bits(got: Answers, got_slot: int, expected: Answers, slot: int) -> None:
    for found, wanted in zip(bits(got, got_slot), bits(expected, slot), strict=True):
        np.testing.assert_array_equal(found, wanted)


@LAYOUTS
def test_slots_do_not_matter(family, layout):
    moved = {ORDER[slot]: row for slot, row in rows().items()}
    got = laid_out(family, layout).answer(moved)
    for slot in rows():
        assert_same_bits(got, ORDER[slot], answers(family, layout), slot)


@LAYOUTS
def test_neighbours_do_not_matter(family, layout):
    """Some slots get other neighbours, and some lose theirs."""
    rng = np.random.default_rng(1)
    kept = {slot: row for slot, row in rows().items() if slot in (0, 3)}
    strangers = {slot: Row(tuple(rng.integers(3, VOCAB, 11).tolist())) for slot in (1, 6, 7)}
    got = laid_out(family, layout).answer({**kept, **strangers})
    for slot in kept:
        assert_same_bits(got, slot, answers(family, layout), slot)


@LAYOUTS
def test_what_former_owners_left_changes_nothing(family, layout):
    """A slot is not cleared for its next row, whose prompt and output may be shorter."""
    under, rng = laid_out(family, layout), np.random.default_rng(1)
    prompts = rng.integers(3, VOCAB, (under.grid.decode_slots, max(PROMPT_LENGTHS)))
    owners = dict(enumerate(Row(tuple(prompt.tolist())) for prompt in prompts))
    got = under.answer(rows(), under.answer(owners).state)
    for slot in rows():
        assert_same_bits(got, slot, answers(family, layout), slot)


@LAYOUTS
def test_nan_reaches_neither_others_nor_the_next_owner_of_a_slot_that_was_cleared(family, layout):
    under = laid_out(family, layout)
    state = filled_with_nan(under)
    for slot in rows():
        state = under.clear(state, slot)
    got = under.answer(rows(), state)
    for slot in rows():
        assert_same_bits(got, slot, answers(family, layout), slot)


@LAYOUTS
def test_a_row_that_meets_nan_ends_alone(family, layout):
    """The graph also reports that the row's slot is not clean."""
    under, sick = laid_out(family, layout), 2
    state, _ = under.prefill(rows())
    got = under.decode(with_nan_in(under, state, sick), rows())
    assert got.output.is_finite_B.tolist() == [slot != sick for slot in range(8)]
    assert got.output.is_clean_B.tolist() == [slot != sick for slot in range(8)]
    assert (got.output.tokens_BQ[sick, 1:] == NO_TOKEN).all()
    for slot in set(rows()) - {sick}:
        assert_same_bits(got, slot, answers(family, layout), slot)


@LAYOUTS
def test_samples_forked_from_slot_to_slot_have_the_bits_of_prompts_of_their_own(family, layout):
    """The first slot is a copy of the last copy, and the prompt fills several pages."""
    under = laid_out(family, layout)
    sampled = SamplingParams(temperature=2.0, ignore_eos=True)
    row = replace(greedy_rows()[3], params=sampled)
    samples = {slot: replace(row, sample=slot) for slot in range(under.grid.decode_slots)}
    state, _ = under.prefill({0: samples[0]})
    for source, slot in pairwise([0, *reversed(samples)]):
        state = under.fork(state, source, slot, samples[slot])
    got, wanted = under.decode(state, samples), under.answer(samples)
    for slot in samples:
        assert_same_bits(got, slot, wanted, slot)
    assert len(set(map(tuple, got.output.tokens_BQ.tolist()))) == len(samples)


def filled_with_nan(under: LaidOut) -> DecodeState:
    """Return an empty state with NaN in the keys, values and logits of its slots."""
    state = under.empty_state()
    layers = jax.tree.map(lambda x: placed_like(np.full(x.shape, np.nan), x), state.cache)
    logits_BV = placed_like(np.full(state.logits_BV.shape, np.nan), state.logits_BV)
    return state._replace(cache=layers, logits_BV=logits_BV)


def with_nan_in(under: LaidOut, state: DecodeState, slot: int) -> DecodeState:
    """Return the state with NaN in the keys and values of one slot's pages."""
    table_BN = under.pages_of([slot], under.grid.max_length)
    assert table_BN is not None

    def poison(layer: LayerState) -> LayerState:
        count = layer.spec.slot_pages
        pages = slot * count + np.arange(count) if count else table_BN[0]

        def of_pages(x: jax.Array) -> jax.Array:
            values = np.array(x)
            values[:, pages] = np.nan
            return placed_like(values, x)

        return jax.tree.map(of_pages, layer)

    layers = tuple(layer and poison(layer) for layer in state.cache)
    return state._replace(cache=layers)


def placed_like(values: np.ndarray, x: jax.Array) -> jax.Array:
    return jax.device_put(jnp.asarray(values, x.dtype), x.sharding)
