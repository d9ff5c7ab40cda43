"""Properties of every decoder: causality, padding, pages, and prefill equal to decode."""

from dataclasses import replace
from functools import cache, partial

import caches
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import changed
from caches import arrays_of, empty_cache, layers_of, pages_in, scattered, with_layers
from flax import nnx
from tolerances import FLOAT32_MODEL_LOGPROB
from unoptimized import set_optimized

from noria.modelzoo import axes
from noria.modelzoo.attention.prompt_pieces import PromptPieces
from noria.modelzoo.attention.shared_pages import SlotPages
from noria.modelzoo.cache.layer_state import LayerState
from noria.modelzoo.config import Arrangement, DecoderConfig, Multipliers
from noria.modelzoo.decoder import Decoder
from noria.modelzoo.layer_config import Chunk, Scores
from noria.modelzoo.operations import ON_ONE_DEVICE
from noria.modelzoo.rope_config import Llama3Scaling, NoRope, RopeConfig

CONFIG = DecoderConfig.alike(
    vocab_size=53,
    embed=24,
    mlp=40,
    num_query_heads=6,
    num_kv_heads=2,
    head_dim=8,
    windows=(None, 4, None),
    max_position=64,
)
VARIANTS = {
    "plain": CONFIG,
    "everything": changed(
        CONFIG,
        rope=RopeConfig(500.0, Llama3Scaling(4.0, 1.0, 4.0, 8)),
        tie_embeddings=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        qk_norm="head",
        sinks=True,
    ),
    "chunks": changed(
        CONFIG,
        rope=NoRope(0.4, interval=3),
        local_rope=RopeConfig(norm_epsilon=1e-5),
        windows=(Chunk(5), None, Chunk(20)),
    ),
    "parallel": changed(CONFIG, is_parallel=True, norm="layer", qk_norm="heads"),
    "other kinds": changed(
        CONFIG,
        qk_norm="projection",
        norm_placement="both",
        scores=Scores(scale=0.5, cap=3.0),
        multipliers=Multipliers(embedding=3.0, residual=0.3, logits=0.5),
        logit_cap=4.0,
        local_rope=RopeConfig(50.0, rotated=4),
        norm_offset=1.0,
        activation="gelu_tanh",
        windows=(4, 10, 4),
    ),
}
T, PAGE_BN = 12, scattered(3, 8)
"""The tokens of a prompt, and the pages of rows of up to 32 entries."""
ALL = np.ones(3, bool)


OPTIMIZED = {"everything", "chunks"}
"""Models with optimized programs in every run. The others have them with `--slow`, which also runs
the plain model: every part of it is in another one."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] * (name == "plain"), id=name)
        for name in VARIANTS
    ],
)
def model(request, optimizes: bool):
    """Graph definition and weights; constants differ from their neutral values."""
    set_optimized(optimizes or request.param in OPTIMIZED)
    graphdef, state = nnx.split(Decoder(VARIANTS[request.param], rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    state = jax.tree.map(lambda x: x + 0.2 * jnp.asarray(rng.normal(size=x.shape), x.dtype), state)
    return graphdef, state


@cache
def program(function, graphdef):
    """Return a jitted function of one model, shared by its tests."""
    return jax.jit(partial(function, graphdef))


def prompts(batch: int = 3) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).integers(0, 53, (batch, T)), jnp.int32)


def test_no_token_depends_on_a_later_one(model):
    """The gradient of each position's output in the embeddings of later tokens is exactly zero."""
    graphdef, state = model
    tokens_BT = jnp.arange(T)[None]  # all tokens differ, so each row of the table is one position

    @jax.jit
    def gradients(state):
        def output(state, position):
            x_BTD, _ = nnx.merge(graphdef, state).forward(tokens_BT, jnp.array([T]))
            return jnp.sum(x_BTD[0, position] * jnp.arange(1.0, CONFIG.embed + 1))

        by_position = jax.vmap(jax.grad(output), in_axes=(None, 0))(state, jnp.arange(T))
        return by_position["embedding"]["table"].get_value()

    size_TT = np.abs(np.asarray(gradients(state))[:, :T]).max(axis=-1)
    assert np.all(size_TT[np.triu_indices(T, 1)] == 0.0)
    assert np.all(size_TT[np.tril_indices(T)] > 0.0)


def forward(graphdef, state, tokens_BT, true_length_B):
    decoder = nnx.merge(graphdef, state)
    return decoder.logits(decoder.forward(tokens_BT, true_length_B)[0])


def prefill(graphdef, state, tokens_BT, true_length_B):
    """Return logits, and a cache with row i in slot i."""
    decoder = nnx.merge(graphdef, state)
    empty = empty_cache(decoder.config, PAGE_BN, row_tokens=1)
    rows = PromptPieces(jnp.arange(3), None, true_length_B, jnp.asarray(PAGE_BN))
    x_BTD, cache, _ = decoder.prefill(tokens_BT, rows, empty, ON_ONE_DEVICE)
    return decoder.logits(x_BTD), cache


def test_what_stands_in_the_padding_changes_no_bit(model):
    graphdef, state = model
    run = program(prefill, graphdef)
    length_B = jnp.array([T, 7, 1])
    is_padding_BT = jnp.arange(T)[None] >= length_B[:, None]
    logits, cache = run(state, prompts(), length_B)
    other_logits, other_cache = run(state, jnp.where(is_padding_BT, 50, prompts()), length_B)
    for row, length in enumerate(length_B.tolist()):
        assert np.array_equal(logits[row, :length], other_logits[row, :length])

    step = program(decode, graphdef)
    next_token = state, jnp.array([5, 9, 11]), length_B
    after, _ = step(*next_token, cache, ALL)
    other_after, _ = step(*next_token, other_cache, ALL)
    assert np.array_equal(after, other_after)


def test_rows_are_bit_equal_under_permutation_of_the_batch(model):
    graphdef, state = model
    run = program(forward, graphdef)
    order, length_B = jnp.array([2, 0, 1]), jnp.array([T, 7, 1])
    logits = run(state, prompts(), length_B)
    permuted = run(state, prompts()[order], length_B[order])
    assert np.array_equal(logits[order], permuted)


def start(graphdef, state, first: int):
    run = program(prefill, graphdef)
    return run(state, prompts(), jnp.full(3, first, jnp.int32))[1]


def decode(graphdef, state, token_B, position_B, cache, is_token_B, page_BN=PAGE_BN):
    call, pages = (token_B, position_B, cache, is_token_B), SlotPages(jnp.asarray(page_BN))
    return caches.decode(nnx.merge(graphdef, state), *call, pages)[:2]


@pytest.mark.parametrize("first", [3, 11])
def test_decode_token_by_token_equals_a_whole_pass(model, first):
    """Eleven tokens take three pages, and exceed most windows."""
    graphdef, state = model
    expected = program(forward, graphdef)(state, prompts(), jnp.full(3, T))
    cache = start(graphdef, state, first)
    step = program(decode, graphdef)
    for position in range(first, T):
        position_B = jnp.full(3, position)
        logits_BV, cache = step(state, prompts()[:, position], position_B, cache, ALL)
        np.testing.assert_allclose(
            jax.nn.log_softmax(logits_BV),
            jax.nn.log_softmax(expected[:, position]),
            rtol=0,
            atol=FLOAT32_MODEL_LOGPROB,
        )


@pytest.mark.parametrize("num_pages", [1, 2])
def test_decode_over_fewer_pages_gives_the_same_bits(model, num_pages):
    graphdef, state = model
    cache = start(graphdef, state, first=3)
    step = program(decode, graphdef)
    call = state, jnp.array([5, 9, 11]), jnp.array([3, 3, 3]), cache, ALL
    logits, whole = step(*call)
    short_logits, short = step(*call, PAGE_BN[:, :num_pages])
    assert np.array_equal(short_logits, logits)
    for ours, expected in zip(jax.tree.leaves(short), jax.tree.leaves(whole), strict=True):
        assert np.array_equal(ours, expected)


def test_a_nan_in_one_row_stays_in_that_row(model):
    """The pages of the row are NaN in all layers, and so are those of no row."""
    graphdef, state = model
    cache = start(graphdef, state, first=3)
    step = program(decode, graphdef)
    arguments = jnp.array([5, 9, 11]), jnp.array([3, 3, 3])
    expected, _ = step(state, *arguments, cache, ALL)
    others = np.array([0, 2])

    def poison(layer: LayerState) -> LayerState:
        healthy = pages_in(layer, PAGE_BN, np.arange(3))[others].ravel()
        return jax.tree.map(
            lambda x: jnp.full_like(x, jnp.nan).at[:, healthy].set(x[:, healthy]), layer
        )

    poisoned = with_layers(cache, map(poison, layers_of(cache)))
    poisoned, _ = step(state, *arguments, poisoned, ALL)
    assert np.all(np.isnan(poisoned[1]))
    assert np.array_equal(poisoned[others], expected[others])


@pytest.mark.parametrize("first", [3, 11])
def test_a_row_without_a_token_writes_nothing(model, first):
    """Eleven tokens fill the pages of windows, which are written at every position."""
    graphdef, state = model
    cache = start(graphdef, state, first)
    step = program(decode, graphdef)
    arguments = state, jnp.array([5, 9, 11]), jnp.full(3, first, jnp.int32), cache
    expected, whole = step(*arguments, ALL)
    logits, after = step(*arguments, jnp.array([True, False, True]))
    runs = np.array([0, 2])
    assert np.array_equal(logits[runs], expected[runs])
    for layers in zip(*map(layers_of, (cache, whole, after)), strict=True):
        own = pages_in(layers[0], PAGE_BN, np.arange(3))[1]
        for before, written, ours in zip(*(arrays_of(x).values() for x in layers), strict=True):
            wanted = written.copy()
            wanted[:, own] = before[:, own]
            assert np.array_equal(ours, wanted) and not np.array_equal(wanted, written)


def test_every_parameter_names_one_logical_axis_per_dimension(model):
    graphdef, state = model
    for path, variable in nnx.to_flat_state(nnx.state(nnx.merge(graphdef, state))):
        names = variable.get_metadata()["logical_axes"]
        assert len(names) == variable.get_value().ndim, path
        assert set(names) <= {*axes.LOGICAL_AXES, ""}, path


def names(config: DecoderConfig) -> set[str]:
    state = nnx.state(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0))))
    return {".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)}


def test_norms_stand_where_the_configuration_places_them():
    before = names(CONFIG)
    after = names(changed(CONFIG, norm_placement="after"))
    both = names(changed(CONFIG, norm_placement="both"))
    assert before | after == both
    assert {name.split(".")[2] for name in both - after} == {"attention_norm", "mlp_norm"}
    assert {name.split(".")[2] for name in both - before} == {
        "attention_post_norm",
        "mlp_post_norm",
    }


def test_a_parallel_block_has_one_norm():
    parallel = names(changed(CONFIG, is_parallel=True))
    assert {name.split(".")[2] for name in parallel if name.startswith("layers.0.")} == {
        "norm",
        "attention",
        "mlp",
    }


@pytest.mark.parametrize("field", ["qk_norm", "norm_placement", "activation", "norm"])
def test_a_kind_that_is_unknown_is_refused(field):
    with pytest.raises(ValueError, match=f"{field}: expected one of .*, got 'sideways'"):
        changed(CONFIG, **{field: "sideways"})


def test_a_factor_of_one_is_no_operation_and_any_other_is_one():
    """A traced pass has more multiplications only if a factor differs from one."""

    def count(multipliers: Multipliers) -> int:
        config = replace(CONFIG, multipliers=multipliers)
        graphdef, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
        traced = jax.make_jaxpr(partial(forward, graphdef))(state, prompts(), jnp.full(3, T))
        return str(traced).count(" mul ")

    plain = count(Multipliers())
    assert count(Multipliers(logits=0.5)) == plain + 1
    assert count(Multipliers(embedding=2.0)) == plain + 1
    assert count(Multipliers(residual=0.5)) == plain + 2 * CONFIG.num_layers


@pytest.mark.parametrize("rotated", [10, 5, -2])
def test_more_than_a_head_and_halves_of_pairs_cannot_be_rotated(rotated):
    with pytest.raises(ValueError, match=r"rope\.rotated: expected an even number of .* 8 entries"):
        changed(CONFIG, rope=RopeConfig(rotated=rotated))


def test_a_factor_on_embeddings_is_rounded_to_their_dtype():
    """The root of 3072 is 55.43, and was 55.5 in bfloat16 when the model was trained."""
    decoder = Decoder(replace(CONFIG, multipliers=Multipliers(3072**0.5)), rngs=nnx.Rngs(0))
    plain = Decoder(CONFIG, rngs=nnx.Rngs(0))
    rows = jax.random.normal(jax.random.key(0), (53, CONFIG.embed), jnp.bfloat16)
    for model in (decoder, plain):
        model.embedding.table.set_value(rows)
    embedded = decoder.embed(prompts())
    assert embedded.dtype == jnp.bfloat16
    assert np.array_equal(embedded, plain.embed(prompts()) * jnp.bfloat16(55.5))


def test_logits_stay_within_their_cap_and_padding_stays_out():
    arrangement = Arrangement(padded_vocab=64)
    decoder = Decoder(replace(CONFIG, logit_cap=2.0), rngs=nnx.Rngs(0), arrangement=arrangement)
    logits_BV = decoder.logits(1e3 * jax.random.normal(jax.random.key(0), (4, CONFIG.embed)))
    assert np.all(np.abs(logits_BV[:, :53]) <= 2.0) and np.all(np.isneginf(logits_BV[:, 53:]))


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_factor_that_makes_no_sense_is_refused(value):
    with pytest.raises(
        ValueError, match=r"multipliers\.residual: expected a finite number above 0"
    ):
        Multipliers(residual=value)
    with pytest.raises(ValueError, match=r"scores\.scale: expected a finite number above 0"):
        Scores(scale=value)


def test_tied_embeddings_have_no_head():
    assert names(CONFIG) - names(replace(CONFIG, tie_embeddings=True)) == {"head.table"}
