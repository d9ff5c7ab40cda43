"""Attention over a ring of devices against dense attention, for every mask."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tolerances import FLOAT32_ELEMENTWISE

from noria.modelzoo.attention.attend import (
    Visibility,
    attend_dense,
    first_visible,
    merge,
    visible,
    with_sinks,
)
from noria.modelzoo.attention.blockwise import attend_blockwise, block_sizes
from noria.modelzoo.cache.stripes import EMPTY_POSITION, Stripe, Stripes
from noria.modelzoo.layer_config import PLAIN_SCORES, BothSides, Chunk, Scores, Window
from noria.sharding.ring_attention import attend_on_ring, merge_shards, num_ring_steps

AXES = ("sequence",)
RINGS = (2, 4, 8)
A_WINDOW_EACH = (None, 7, Chunk(6))
WINDOWS = (None, 1, 3, 7, 24, Chunk(1), Chunk(5), Chunk(6), Chunk(24))
SIZES = pytest.mark.parametrize("n", RINGS)
BY_WINDOW = pytest.mark.parametrize("window", WINDOWS, ids=str)
T, B, K, G, H, VALUE_DIM = 48, 2, 2, 3, 4, 6
SMALL_BLOCKS = partial(attend_blockwise, query_block=4, block_scores=20)
"""Attention in blocks of 4 queries and 5 keys, which do not divide any part of the ring."""


@cache
def mesh(n: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:n]), AXES)


def inputs(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = ((B, T, K, G, H), (B, K, H, T), (B, K, T, VALUE_DIM))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def positions(*true_lengths: int) -> tuple[np.ndarray, np.ndarray]:
    """Return query and key positions in token order; keys past the true length are padding."""
    query_BT = np.tile(np.arange(T, dtype=np.int32), (len(true_lengths), 1))
    is_token_BT = query_BT < np.array(true_lengths)[:, None]
    return query_BT, np.where(is_token_BT, query_BT, EMPTY_POSITION).astype(np.int32)


def ring(n: int, attend=attend_dense):
    """Return `attend` for whole arrays in token order, computed on n devices."""
    stripes = Stripes(n)
    spec = (P(None, "sequence"), P(None, None, None, "sequence"), P(None, None, "sequence"))

    def over_all(q_BTKGH, k_BKHS, v_BKSH, query_BT, key_BT, window: Window, scores=PLAIN_SCORES):
        def local(q_BTKGH, k_BKHS, v_BKSH, query_BT, key_BT):
            seen = Visibility(query_BT, key_BT, window)
            return attend_on_ring(attend, AXES, q_BTKGH, k_BKHS, v_BKSH, seen, scores)

        arrays = (q_BTKGH, k_BKHS, v_BKSH, query_BT, key_BT)
        laid = [stripes.permute(x, axis) for x, axis in zip(arrays, (1, 3, 2, 1, 1), strict=True)]
        over = jax.shard_map(
            local, mesh=mesh(n), in_specs=(*spec, P(), P()), out_specs=spec[0], check_vma=False
        )
        return tuple(stripes.restore(x, 1) for x in over(*laid))

    return over_all


def assert_equals_dense(attend, arrays, window: Window, scores: Scores = PLAIN_SCORES) -> None:
    query_BT, key_BT = positions(T, 29)
    seen = Visibility(jnp.asarray(query_BT), jnp.asarray(key_BT), window)
    expected = jax.jit(lambda *x: attend_dense(*x, seen, scores))(*arrays)
    got = jax.jit(lambda *x: attend(*x, query_BT, key_BT, window, scores))(*arrays)
    for ours, whole in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=0, atol=FLOAT32_ELEMENTWISE)


@pytest.mark.parametrize(
    ("n", "window"),
    [(8, window) for window in WINDOWS]
    + [(n, w) for n in (2, 4) for w in A_WINDOW_EACH]
    + [(4, BothSides()), (8, BothSides(3))],
    ids=str,
)
def test_a_prompt_attends_on_a_ring_as_it_would_at_once(n, window):
    """The inputs have grouped heads, values of another size than keys, and padding."""
    assert_equals_dense(ring(n), inputs(), window)


@pytest.mark.parametrize("window", A_WINDOW_EACH, ids=str)
def test_each_step_may_go_block_by_block(window):
    """The blocks do not divide any device's part."""
    assert_equals_dense(ring(4, SMALL_BLOCKS), inputs(), window)


@pytest.mark.parametrize("window", [None, 7], ids=str)
def test_scores_are_capped_and_scaled_on_a_ring(window):
    assert_equals_dense(ring(4), inputs(), window, Scores(0.9, 0.7))


@SIZES
@BY_WINDOW
def test_a_ring_turns_as_far_as_some_query_sees_and_no_further(n, window):
    """The expected parts, by their distance, come from masks over all tokens."""
    length = T // n
    position_T = Stripes(n).permute(np.arange(T)[None], 1)
    is_seen_TS = visible(position_T, position_T, window)[0]
    is_seen = is_seen_TS.reshape(n, length, n, length).any(axis=(1, 3))
    needed = {(i - j) % n for i in range(n) for j in range(n) if is_seen[i, j]}
    assert num_ring_steps(window, n) == max(needed) + 1


def test_sinks_join_after_the_last_merge():
    query_BT, key_BT = positions(T, 29)
    sink_KG = np.random.default_rng(1).normal(size=(K, G)).astype(np.float32)
    seen = Visibility(jnp.asarray(query_BT), jnp.asarray(key_BT), 7)
    expected = with_sinks(*attend_dense(*inputs(), seen), sink_KG)
    got = with_sinks(*jax.jit(lambda *x: ring(4)(*x, query_BT, key_BT, 7))(*inputs()), sink_KG)
    np.testing.assert_allclose(got, expected, rtol=0, atol=FLOAT32_ELEMENTWISE)


@pytest.mark.parametrize("window", A_WINDOW_EACH, ids=str)
def test_nothing_flows_back_from_the_future_or_from_outside_a_window(window):
    """The gradient of an output in keys and values that its query does not see is exactly zero."""
    query_BT, key_BT = positions(T, T)
    attend, t = ring(4), 29

    def out(q_BTKGH, k_BKHS, v_BKSH):
        out_BTKGH, _ = attend(q_BTKGH, k_BKHS, v_BKSH, query_BT, key_BT, window)
        return jnp.sin(out_BTKGH[:, t]).sum()

    q_BTKGH, k_BKHS, v_BKSH = jax.jit(jax.grad(out, argnums=(0, 1, 2)))(*inputs())
    flows = {
        "q": np.abs(q_BTKGH).sum(axis=(0, 2, 3, 4)) > 0,
        "k": np.abs(k_BKHS).sum(axis=(0, 1, 2)) > 0,
        "v": np.abs(v_BKSH).sum(axis=(0, 1, 3)) > 0,
    }
    first = 0 if window is None else first_visible(t, window)
    is_seen_T = (np.arange(T) >= first) & (np.arange(T) <= t)
    assert (flows["q"] == (np.arange(T) == t)).all()
    assert (flows["k"] == is_seen_T).all() and (flows["v"] == is_seen_T).all()


def test_half_precision_is_rounded_at_the_end():
    """In bfloat16, eight devices are no further from the exact result than one device."""
    query_BT, key_BT = positions(T, T)
    halves = [jnp.asarray(x, jnp.bfloat16) for x in inputs()]
    seen = Visibility(jnp.asarray(query_BT), jnp.asarray(key_BT))
    exact, _ = attend_dense(*(x.astype(jnp.float32) for x in halves), seen)
    whole, _ = attend_dense(*halves, seen)
    parts, _ = jax.jit(lambda *x: ring(8)(*x, query_BT, key_BT, None))(*halves)
    worst, worst_of_parts = (np.abs(x.astype(jnp.float32) - exact).max() for x in (whole, parts))
    assert worst_of_parts < 2 * worst


def test_shards_of_a_cache_merge_to_the_whole():
    """A query sees no key of some shards, and a row sees no key at all."""
    rng = np.random.default_rng(0)
    parts = [(rng.normal(size=(B, 1, K, G, H)), rng.normal(size=(B, 1, K, G))) for _ in range(8)]
    out, lse = (np.stack(x).astype(np.float32) for x in zip(*parts, strict=True))
    lse[3], lse[:, 1] = -np.inf, -np.inf
    out[np.isneginf(lse)] = 0
    over = jax.shard_map(
        lambda out, lse: merge_shards(out[0], lse[0], AXES),
        mesh=mesh(8),
        in_specs=P("sequence"),
        out_specs=P(),
        check_vma=False,
    )
    expected = merge([(jnp.asarray(o), jnp.asarray(x)) for o, x in zip(out, lse, strict=True)])
    for ours, whole in zip(jax.jit(over)(out, lse), expected, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=0, atol=FLOAT32_ELEMENTWISE)


@SIZES
def test_stripes_hold_every_token_once_and_know_where(n):
    tokens = np.arange(T)[None]
    laid = Stripes(n).permute(tokens, 1)
    assert (Stripes(n).restore(laid, 1) == tokens).all()
    for index, part in enumerate(np.split(laid[0], n)):
        stripe = Stripe(index, n)
        assert (np.asarray(stripe.position(np.arange(T // n))) == part).all()


def executed_pairs(length: int, n: int) -> np.ndarray:
    """Return the number of block pairs of each device at each step, `[steps, n]`."""
    position_DT = Stripes(n).permute(np.arange(length)[None], 1).reshape(n, -1)
    block_T, block_S = block_sizes(length // n, length // n)
    pairs = np.zeros((n, n), int)
    for step in range(n):
        for device in range(n):
            queries = np.split(position_DT[device], length // n // block_T)
            keys = np.split(position_DT[(device - step) % n], length // n // block_S)
            pairs[step, device] = sum(
                bool(Visibility(q[None], k[None]).mask().any()) for q in queries for k in keys
            )
    return pairs


def imbalance(length: int, n: int) -> float:
    """Return the sum over steps of the slowest device's block pairs, over the mean's sum."""
    pairs = executed_pairs(length, n)
    return pairs.max(axis=1).sum() / pairs.mean(axis=1).sum()


@SIZES
@pytest.mark.parametrize("length", [4096, 16384])
def test_stripes_balance_the_work_of_causal_attention(n, length):
    assert imbalance(length, n) <= 1.05
