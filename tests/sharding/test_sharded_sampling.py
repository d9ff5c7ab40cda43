"""Sampling over a split and padded vocabulary gives the tokens of one device, for every option.

The vocabulary has 151 ids, so every layout that splits it pads it.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from laid_out import (
    FAMILY_OF,
    STOP_ID,
    VOCAB,
    Answers,
    LaidOut,
    Row,
    config_of,
    greedy_rows,
    laid_out,
    layout_of,
)
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.graphs.signatures import greedy_sampling
from noria.compile.graphs.steps import NO_TOKEN
from noria.modelzoo.sampling import History, sample
from noria.modelzoo.structure import StructureTables, allowed_tokens, next_states
from noria.runtime.request import SamplingParams
from noria.sharding.mesh_layout import MeshLayout

SPLIT = pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param(
            FAMILY_OF[layout], layout, marks=[pytest.mark.slow] * (layout == "weight-stationary-1d")
        )
        for layout in ("weight-stationary-1d", "data-tensor-batch-attention", "v5p-slice")
    ],
)
OPTIONS = (
    SamplingParams(temperature=1.5, logprobs=0),
    SamplingParams(temperature=50.0),
    SamplingParams(temperature=5.0, top_k=3),
    SamplingParams(temperature=5.0, top_p=0.7),
    SamplingParams(temperature=5.0, min_p=0.2),
    SamplingParams(
        temperature=0, presence_penalty=2.0, frequency_penalty=1.5, repetition_penalty=3.0
    ),
    SamplingParams(temperature=9.0, logit_bias={150: 100.0, 149: 100.0, 5: -100.0}, logprobs=20),
    SamplingParams(temperature=0, logit_bias={STOP_ID: 100.0}, min_tokens=3, logprobs=5),
)
REPORTING = {0: 0, 6: 20, 7: 5}
"""Number of reported alternatives by slot."""


def rows() -> dict[int, Row]:
    prompts = [row.prompt for row in greedy_rows().values()]
    return {
        slot: Row(prompts[slot % len(prompts)], params, seed=slot)
        for slot, params in enumerate(OPTIONS)
    }


@cache
def answers(family: str, layout: str | None) -> Answers:
    return laid_out(family, layout).answer(rows())


@SPLIT
def test_sampled_tokens_are_those_of_one_device(family, layout):
    got, expected = (answers(family, name).output.tokens_BQ for name in (layout, None))
    assert (got == expected).all()


@SPLIT
def test_ids_that_pad_the_vocabulary_are_never_chosen(family, layout):
    under, answer = laid_out(family, layout), answers(family, layout)
    assert under.definition.padded_vocab == 152
    padding_BV = np.asarray(answer.state.logits_BV)[:, VOCAB:]
    assert padding_BV.shape == (8, 1)
    assert (padding_BV == -np.inf).all()
    assert answer.output.tokens_BQ.max() < VOCAB


@SPLIT
def test_reported_logprobs_and_alternatives_are_those_of_one_device(family, layout):
    got, expected = (answers(family, name).output for name in (layout, None))
    for slot, num_alternatives in REPORTING.items():
        emitted_Q = expected.tokens_BQ[slot] != NO_TOKEN
        chosen, alternatives = (slot, emitted_Q), (slot, emitted_Q, slice(num_alternatives))
        assert (
            got.scores.top_ids_BR[alternatives] == expected.scores.top_ids_BR[alternatives]
        ).all()
        for values, wanted in (
            (got.scores.logprob_B[chosen], expected.scores.logprob_B[chosen]),
            (
                got.scores.top_logprobs_BR[alternatives],
                expected.scores.top_logprobs_BR[alternatives],
            ),
        ):
            np.testing.assert_allclose(values, wanted, rtol=0, atol=FLOAT32_MODEL_LOGPROB)


def test_the_options_do_something_on_one_device():
    """Otherwise rows that ignore the options would pass."""
    family = FAMILY_OF["v5p-slice"]
    tokens_BQ = answers(family, None).output.tokens_BQ
    prompts = {slot: Row(row.prompt) for slot, row in rows().items()}
    greedy_BQ = laid_out(family).answer(prompts).output.tokens_BQ
    assert (tokens_BQ[:7] != greedy_BQ[:7]).any(axis=1).all()
    assert set(tokens_BQ[6]) <= {149, 150}
    assert tokens_BQ[7].tolist().index(STOP_ID) == 3


@pytest.mark.parametrize("padded_vocab", [152, 153, 160])
def test_the_noise_of_an_id_does_not_depend_on_the_padding(padded_vocab):
    """All ids are equally likely, so that only noise decides."""
    B = 64

    def draw(V: int) -> np.ndarray:
        state = greedy_sampling(B, V)._replace(
            temperature_B=jnp.ones(B), key_B2=jnp.arange(2 * B, dtype=jnp.uint32).reshape(B, 2)
        )
        logits_BV = jnp.where(jnp.arange(V)[None] < VOCAB, jnp.zeros((B, V)), -jnp.inf)
        length_B = jnp.arange(B)
        history = History(jnp.zeros((B, B), jnp.int32), jnp.zeros_like(length_B), length_B)
        return np.asarray(jax.jit(sample)(logits_BV, state, history, jnp.ones(B, bool)))

    drawn_B = draw(VOCAB)
    assert len(set(drawn_B.tolist())) > B / 2
    assert (draw(padded_vocab) == drawn_B).all()


def test_a_tie_between_shards_goes_to_the_lowest_id():
    mesh = MeshLayout.from_table({"tensor": 8}).build(jax.devices())
    logits_BV = np.array(
        [
            [0, 0, 0, 0, 0, 0, 0, 0],
            [0, 0, 5, 0, 0, 5, 0, 5],
            [1, 1, 1, 1, 1, 1, 2, 2],
            [-np.inf, -np.inf, -np.inf, 3, 3, -np.inf, -np.inf, -np.inf],
        ],
        np.float32,
    )
    B, V = logits_BV.shape
    history = History(jnp.zeros((B, 4), jnp.int32), jnp.zeros(B, jnp.int32), jnp.ones(B, jnp.int32))
    split_BV = jax.device_put(logits_BV, NamedSharding(mesh, P(None, "tensor")))
    chosen_B = jax.jit(sample)(split_BV, greedy_sampling(B, V), history, jnp.ones(B, bool))
    assert chosen_B.tolist() == [0, 2, 6, 3]


@pytest.mark.parametrize(
    ("family", "layout", "in_chunks"),
    [
        ("mistral", "sequence-parallel", False),
        pytest.param("mistral", "data-tensor-batch-attention", False, marks=pytest.mark.slow),
        pytest.param("gpt_oss", "ring", False, marks=pytest.mark.slow),
        ("gpt_oss", "ring", True),
    ],
)
def test_prompt_tokens_score_as_on_one_device(family, layout, in_chunks):
    """Prefill splits tokens in order or in stripes in some layouts, and rows in others."""
    num_logprobs, config = 5, config_of(family)
    got, expected = (
        model.score(greedy_rows(), num_logprobs)
        for model in (
            LaidOut(config, layout_of(layout), in_chunks=in_chunks),
            LaidOut(config),
        )
    )
    for slot, row in greedy_rows().items():
        ours, wanted = got[slot], expected[slot]
        assert len(ours.logprob_B) == len(row.prompt) - 1
        np.testing.assert_allclose(
            ours.logprob_B, wanted.logprob_B, rtol=0, atol=FLOAT32_MODEL_LOGPROB
        )
        ids, wanted_ids = (x.top_ids_BR[:, :num_logprobs] for x in (ours, wanted))
        assert (ids == wanted_ids).all()


def test_masks_of_forms_hold_on_a_split_vocabulary():
    mesh = MeshLayout.from_table({"tensor": 8}).build(jax.devices())
    B, V, S = 4, 152, 3
    draw = np.random.default_rng(0)
    tables = StructureTables._make(
        (
            draw.integers(0, 3, (S, 2)).astype(np.int32),
            draw.integers(0, 2, (3, 4)).astype(np.int16),
            np.array([0, 1, 1], np.int32),
            np.array([0, 1], np.int32),
            draw.integers(0, 5, (2, V)).astype(np.int16),
            np.array([[0, 9], [1, 3], [2, 9]], np.int32),
            np.array([[0, 0], [1, 2], [3, 0]], np.int32),
            draw.integers(0, 6, (4, 3)).astype(np.int32),
            draw.integers(0, 2**32, (6, 2), np.uint32, endpoint=False),
        )
    )
    state_B, left_B = np.array([0, 1, 1, 2], np.int32), np.array([5, 2, 3, 2], np.int32)
    logits_BV = draw.normal(size=(B, V)).astype(np.float32)
    history = History(jnp.zeros((B, 4), jnp.int32), jnp.zeros(B, jnp.int32), jnp.ones(B, jnp.int32))

    @jax.jit
    def step(logits_BV: jax.Array, tables: StructureTables) -> tuple[jax.Array, jax.Array]:
        allowed_BV = allowed_tokens(tables, jnp.asarray(state_B), jnp.asarray(left_B), V)
        live_B = jnp.ones(B, bool)
        token_B = sample(logits_BV, greedy_sampling(B, V), history, live_B, allowed_BV)
        return token_B, next_states(tables, jnp.asarray(state_B), token_B)

    split_BV = jax.device_put(logits_BV, NamedSharding(mesh, P(None, "tensor")))
    replicated = jax.device_put(tables, NamedSharding(mesh, P()))
    words_BW = tables.words_QU[tables.mask_block_MJ].reshape(B, -1)
    bits_BV = np.unpackbits(words_BW.view(np.uint8), axis=1, bitorder="little")[:, :V]
    expected_B = np.where(bits_BV, logits_BV, -np.inf).argmax(axis=1)
    for given in (step(logits_BV, tables), step(split_BV, replicated)):
        assert given[0].tolist() == expected_B.tolist()
    assert step(split_BV, replicated)[1].tolist() == step(logits_BV, tables)[1].tolist()
