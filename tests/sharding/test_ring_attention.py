"""Attention over a ring of devices against attention at once: every mask, both orders of tokens."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from tolerances import FLOAT32_ELEMENTWISE

from noria.modelzoo.attention import (
    EMPTY_POSITION,
    Visibility,
    attend_dense,
    first_visible,
    merge,
    visible,
    with_sinks,
)
from noria.modelzoo.blockwise import attend_blockwise, block_sizes
from noria.modelzoo.config import PLAIN_SCORES, Chunk, Scores, Window
from noria.modelzoo.stripes import Stripe, Stripes
from noria.sharding import ring_attention
from noria.sharding.cache_attention import merge_shards
from noria.sharding.ring_attention import Ring, pass_queries, reach, steps

AXES = ("sequence",)
RINGS = (2, 4, 8)
A_WINDOW_EACH = (None, 7, Chunk(6))
WINDOWS = (None, 1, 3, 7, 24, Chunk(1), Chunk(5), Chunk(6), Chunk(24))
ORDERS = pytest.mark.parametrize("is_striped", [True, False], ids=["striped", "contiguous"])
SIZES = pytest.mark.parametrize("n", RINGS)
BY_WINDOW = pytest.mark.parametrize("window", WINDOWS, ids=str)
T, B, K, G, H, VALUE_DIM = 48, 2, 2, 3, 4, 6
SMALL_BLOCKS = partial(attend_blockwise, query_block=4, block_scores=20)
"""Blocks of 4 queries and 5 keys, which divide no part of the ring."""


@cache
def mesh(n: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:n]), AXES)


def inputs(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = ((B, T, K, G, H), (B, K, H, T), (B, K, T, VALUE_DIM))
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def positions(*true_lengths: int) -> tuple[np.ndarray, np.ndarray]:
    """Of queries and keys, in the order of tokens; keys past the true length are padding."""
    query_BT = np.tile(np.arange(T, dtype=np.int32), (len(true_lengths), 1))
    is_token_BT = query_BT < np.array(true_lengths)[:, None]
    return query_BT, np.where(is_token_BT, query_BT, EMPTY_POSITION).astype(np.int32)


def on_a_ring(n: int, is_striped: bool, body):
    """`attend` over whole arrays in the order of tokens, carried out over n devices."""
    stripes = Stripes(n if is_striped else 1)
    spec = (P(None, "sequence"), P(None, None, None, "sequence"), P(None, None, "sequence"))

    def attend(q_BTKGH, k_BKHS, v_BKSH, query_BT, key_BT, window: Window, scores=PLAIN_SCORES):
        def local(q_BTKGH, k_BKHS, v_BKSH, query_BT, key_BT):
            return body(
                q_BTKGH, k_BKHS, v_BKSH, Visibility(query_BT, key_BT, window), scores=scores
            )

        arrays = (q_BTKGH, k_BKHS, v_BKSH, query_BT, key_BT)
        laid = [stripes.lay(x, axis) for x, axis in zip(arrays, (1, 3, 2, 1, 1), strict=True)]
        over = jax.shard_map(
            local, mesh=mesh(n), in_specs=(*spec, P(), P()), out_specs=spec[0], check_vma=False
        )
        return tuple(stripes.restore(x, 1) for x in over(*laid))

    return attend


def ring(n: int, is_striped: bool, attend=attend_dense):
    return on_a_ring(n, is_striped, partial(Ring(AXES, is_striped).attend, attend))


def assert_equals_dense(attend, arrays, window: Window, scores: Scores = PLAIN_SCORES) -> None:
    query_BT, key_BT = positions(T, 29)
    seen = Visibility(jnp.asarray(query_BT), jnp.asarray(key_BT), window)
    expected = jax.jit(lambda *x: attend_dense(*x, seen, scores))(*arrays)
    got = jax.jit(lambda *x: attend(*x, query_BT, key_BT, window, scores))(*arrays)
    for ours, whole in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=0, atol=FLOAT32_ELEMENTWISE)


@pytest.mark.parametrize(
    ("n", "window"),
    [(8, window) for window in WINDOWS] + [(n, w) for n in (2, 4) for w in A_WINDOW_EACH],
    ids=str,
)
@ORDERS
def test_a_prompt_attends_on_a_ring_as_it_would_at_once(n, is_striped, window):
    """Grouped heads, values of their own size, padding."""
    assert_equals_dense(ring(n, is_striped), inputs(), window)


@ORDERS
@pytest.mark.parametrize("window", A_WINDOW_EACH, ids=str)
def test_each_step_may_go_block_by_block(is_striped, window):
    """Blocks that divide no device's part."""
    assert_equals_dense(ring(4, is_striped, SMALL_BLOCKS), inputs(), window)


@ORDERS
@pytest.mark.parametrize("window", [None, 7], ids=str)
def test_scores_are_capped_and_scaled_on_a_ring(is_striped, window):
    assert_equals_dense(ring(4, is_striped), inputs(), window, Scores(0.9, 0.7))


@ORDERS
@pytest.mark.parametrize("window", A_WINDOW_EACH, ids=str)
def test_queries_may_go_round_in_place_of_keys(is_striped, window):
    n = 4

    def body(q_BTKGH, k_BKHS, v_BKSH, visibility, scores):
        num_steps = steps(window, T // n, n, is_striped)
        attend = partial(attend_dense, scores=scores)
        return pass_queries(attend, (q_BTKGH, k_BKHS, v_BKSH), visibility, AXES, num_steps)

    assert_equals_dense(on_a_ring(n, is_striped, body), inputs(), window)


def test_what_sends_less_goes_round(monkeypatch):
    """One query head a key/value head: keys and values; many values a query: queries."""
    chosen = []
    for name in ("pass_keys", "pass_queries"):
        monkeypatch.setattr(ring_attention, name, lambda *x, name=name: chosen.append(name))
    attend = Ring(AXES, is_striped=True).attend

    def body(q_BTKGH, k_BKHS, v_BKSH):
        attend(
            attend_dense, q_BTKGH, k_BKHS, v_BKSH, Visibility(jnp.zeros((1, 8)), jnp.zeros((1, 8)))
        )
        return q_BTKGH

    def trace(queries: int, keys: int) -> None:
        shapes = ((1, queries, 1, 1, H), (1, 1, H, keys), (1, 1, keys, H))
        over = jax.shard_map(body, mesh=mesh(4), in_specs=P(), out_specs=P(), check_vma=False)
        jax.eval_shape(over, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))

    trace(8, 8)
    trace(8, 64)
    assert chosen == ["pass_keys", "pass_queries"]


def test_bytes_of_either_direction_are_those_of_what_travels():
    """Three steps of four: bfloat16 keys of 8 heads against float32 results of 64."""
    shapes = (1, 16, 8, 8, 128), (1, 8, 128, 16), (1, 8, 16, 128)
    q, k, v = (jnp.zeros(shape, jnp.bfloat16) for shape in shapes)
    assert ring_attention.key_bytes(k, v, 4) == 3 * 2 * (8 * 128 * 16) * 2
    results = 16 * 64 * 129 * 4
    assert ring_attention.query_bytes(q, v, 4) == 3 * (16 * 64 * 128 * 2 + results) + results
    assert ring_attention.key_bytes(k, v, 1) == ring_attention.query_bytes(q, v, 1) == 0


@ORDERS
@SIZES
@BY_WINDOW
def test_a_ring_turns_as_far_as_some_query_sees_and_no_further(n, is_striped, window):
    """Parts by their distance, from masks over all tokens."""
    length = T // n
    position_T = Stripes(n if is_striped else 1).lay(np.arange(T)[None], 1)
    is_seen_TS = visible(position_T, position_T, window)[0]
    is_seen = is_seen_TS.reshape(n, length, n, length).any(axis=(1, 3))
    needed = {(i - j) % n for i in range(n) for j in range(n) if is_seen[i, j]}
    assert steps(window, length, n, is_striped) == max(needed) + 1


@SIZES
@pytest.mark.parametrize("window", WINDOWS[1:], ids=str)
def test_a_window_reaches_as_far_before_neighbours_as_some_query_sees(n, window):
    length, position_T = T // n, np.arange(T)
    is_seen_TS = visible(position_T[None], position_T[None], window)[0]
    first_T = is_seen_TS.argmax(axis=1)
    assert reach(window, length, n) == max(position_T // length * length - first_T)


def test_a_window_in_stripes_sends_what_a_layer_without_one_sends_and_among_neighbours_itself():
    """Tokens whose keys and values a device sends, of 131,072 on eight."""
    length = 131_072 // 8
    assert (steps(1024, length, 8, is_striped=True) - 1) * length == 114_688
    assert reach(1024, length, 8) == 1023


def test_sinks_join_after_the_last_merge():
    query_BT, key_BT = positions(T, 29)
    sink_KG = np.random.default_rng(1).normal(size=(K, G)).astype(np.float32)
    seen = Visibility(jnp.asarray(query_BT), jnp.asarray(key_BT), 7)
    expected = with_sinks(*attend_dense(*inputs(), seen), sink_KG)
    got = with_sinks(
        *jax.jit(lambda *x: ring(4, True)(*x, query_BT, key_BT, 7))(*inputs()), sink_KG
    )
    np.testing.assert_allclose(got, expected, rtol=0, atol=FLOAT32_ELEMENTWISE)


@ORDERS
@pytest.mark.parametrize("window", A_WINDOW_EACH, ids=str)
def test_nothing_flows_back_from_the_future_or_from_outside_a_window(is_striped, window):
    """The gradient of an output with respect to what its query does not see is exactly zero."""
    query_BT, key_BT = positions(T, T)
    attend, t = ring(4, is_striped), 29

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
    """What eight devices make of bfloat16 is no further off than what one makes."""
    query_BT, key_BT = positions(T, T)
    halves = [jnp.asarray(x, jnp.bfloat16) for x in inputs()]
    seen = Visibility(jnp.asarray(query_BT), jnp.asarray(key_BT))
    exact, _ = attend_dense(*(x.astype(jnp.float32) for x in halves), seen)
    whole, _ = attend_dense(*halves, seen)
    parts, _ = jax.jit(lambda *x: ring(8, True)(*x, query_BT, key_BT, None))(*halves)
    worst, worst_of_parts = (np.abs(x.astype(jnp.float32) - exact).max() for x in (whole, parts))
    assert worst_of_parts < 2 * worst


def test_shards_of_a_cache_merge_to_the_whole():
    """With shards that a query sees nothing of, and a row that sees nothing at all."""
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
    laid = Stripes(n).lay(tokens, 1)
    assert (Stripes(n).restore(laid, 1) == tokens).all()
    for index, part in enumerate(np.split(laid[0], n)):
        stripe = Stripe(index, n)
        assert (np.asarray(stripe.position(np.arange(T // n))) == part).all()
        assert (np.asarray(stripe.place(part)) == np.arange(T // n)).all()
        assert (np.asarray(stripe.place(part + 1)) == -1).all()
        for length in (0, 1, n, T - 1, T):
            assert stripe.num_tokens(length) == (part < length).sum()


def executed_pairs(length: int, n: int, is_striped: bool) -> np.ndarray:
    """Pairs of blocks that each device attends to at each step, `[steps, n]`."""
    position_DT = Stripes(n if is_striped else 1).lay(np.arange(length)[None], 1).reshape(n, -1)
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


def imbalance(length: int, n: int, is_striped: bool) -> float:
    """Block pairs one after the other, as every step waits for its slowest, over their mean."""
    pairs = executed_pairs(length, n, is_striped)
    return pairs.max(axis=1).sum() / pairs.mean(axis=1).sum()


@SIZES
@pytest.mark.parametrize("length", [4096, 16384])
def test_stripes_balance_the_work_of_causal_attention(n, length):
    assert imbalance(length, n, is_striped=True) <= 1.05


@SIZES
def test_neighbours_leave_devices_waiting(n):
    """2 - 1/n where blocks are small beside a device's part."""
    assert imbalance(32768, n, is_striped=False) == pytest.approx(2 - 1 / n, rel=0.05)
