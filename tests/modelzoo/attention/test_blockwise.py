"""Blockwise attention against dense attention: indivisible sizes, orders, every mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import FLOAT32_ELEMENTWISE

from noria.modelzoo.attention.attend import Visibility, attend_dense
from noria.modelzoo.attention.blockwise import attend_blockwise, block_size
from noria.modelzoo.cache.stripes import EMPTY_POSITION
from noria.modelzoo.layer_config import PLAIN_SCORES, BothSides, Chunk, Scores

WINDOWS = (
    *(None, 1, 5, 16, 19),
    *map(Chunk, (1, 5, 16, 19)),
    *map(BothSides, (None, 1, 7, 40)),
)


def random_inputs(T: int, S: int, seed: int = 0, value_dim: int = 4):
    rng = np.random.default_rng(seed)
    shapes = ((2, T, 2, 3, 4), (2, 2, 4, S), (2, 2, S, value_dim))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def assert_equals_dense(
    inputs, visibility: Visibility, scores: Scores = PLAIN_SCORES, **blocks: int
):
    expected = jax.jit(lambda *x: attend_dense(*x, visibility, scores))(*inputs)
    got = jax.jit(lambda *x: attend_blockwise(*x, visibility, scores, **blocks))(*inputs)
    for ours, whole in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, whole, rtol=0, atol=FLOAT32_ELEMENTWISE)


def positions(length: int, *true_lengths: int) -> jax.Array:
    position_BT = np.tile(np.arange(length), (len(true_lengths), 1))
    padded = np.where(position_BT < np.array(true_lengths)[:, None], position_BT, EMPTY_POSITION)
    return jnp.asarray(padded)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("blocks", [(16, 16), (16, 41), (41, 7)], ids=str)
def test_a_prompt_attends_in_blocks_as_it_would_at_once(window, blocks):
    """The keys exceed two blocks and no block divides them; the second row ends in padding."""
    query_block, key_block = blocks
    key_position_BT = positions(41, 41, 21)
    visibility = Visibility(positions(41, 41, 41), key_position_BT, window)
    sizes = {"query_block": query_block, "block_scores": query_block * key_block}
    assert_equals_dense(random_inputs(41, 41), visibility, **sizes)


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_tokens_may_lie_in_any_order(window):
    rng = np.random.default_rng(1)
    query, key = (jnp.asarray(np.stack([rng.permutation(48) for _ in "ab"])) for _ in "qk")
    visibility = Visibility(query[:, :24], jnp.where(key < 40, key, EMPTY_POSITION), window)
    assert_equals_dense(random_inputs(24, 48), visibility, query_block=8, block_scores=64)


@pytest.mark.parametrize("length", [129, 300, 1024])
@pytest.mark.parametrize("window", [None, 5, 200, Chunk(100), BothSides(), BothSides(9)], ids=str)
def test_prompts_in_order_attend_to_what_is_before_each_block(window, length):
    """Padding may attend to padding, so the test compares only tokens."""
    true_lengths = length, length // 3
    keys = positions(length, *true_lengths)
    visibility = Visibility(positions(length, length, length), keys, window, is_in_order=True)
    inputs = random_inputs(length, length)
    expected = jax.jit(lambda *x: attend_dense(*x, visibility))(*inputs)
    got = jax.jit(lambda *x: attend_blockwise(*x, visibility))(*inputs)
    for ours, whole in zip(got, expected, strict=True):
        for row, end in enumerate(true_lengths):
            np.testing.assert_allclose(
                ours[row, :end], whole[row, :end], rtol=0, atol=FLOAT32_ELEMENTWISE
            )


def test_scores_are_capped_and_heads_of_values_have_their_own_size():
    visibility = Visibility(positions(20, 20, 20), positions(20, 20, 3))
    inputs = random_inputs(20, 20, value_dim=7)
    assert_equals_dense(inputs, visibility, Scores(0.9, 0.7), query_block=8, block_scores=64)


def test_queries_that_see_nothing_get_exactly_zero():
    visibility = Visibility(positions(16, 16, 16), positions(16, 0, 16))
    out, lse = attend_blockwise(*random_inputs(16, 16), visibility, query_block=4, block_scores=16)
    assert np.all(np.asarray(out[0]) == 0) and np.all(np.isneginf(lse[0]))


@pytest.mark.usefixtures("optimized")
def test_keys_that_are_not_seen_never_matter():
    q, k, v = random_inputs(16, 16)
    visibility = Visibility(positions(16, 16, 16), positions(16, 11, 11))
    attend = jax.jit(lambda k, v: attend_blockwise(
        q, k, v, visibility, query_block=8, block_scores=32
    ))  # fmt: skip
    before = attend(k, v)
    after = attend(k.at[..., 11:].set(1e4), v.at[:, :, 11:].set(-1e4))
    assert all(np.array_equal(old, new) for old, new in zip(before, after, strict=True))


def test_half_precision_keeps_sums_in_float32():
    """A merge of rounded parts would be less exact than the whole sum."""
    inputs = [x.astype(jnp.bfloat16) for x in random_inputs(64, 64)]
    visibility = Visibility(positions(64, 64, 64), positions(64, 64, 64))
    exact, _ = attend_dense(*(x.astype(jnp.float32) for x in inputs), visibility)
    whole, _ = attend_dense(*inputs, visibility)
    out, lse = attend_blockwise(*inputs, visibility, query_block=8, block_scores=64)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    errors = [np.abs(np.asarray(x, np.float32) - exact).mean() for x in (out, whole)]
    assert errors[0] < 1.1 * errors[1]


@pytest.mark.parametrize(
    ("length", "most", "expected"),
    [
        (1, 8, 1),
        (8, 8, 8),
        (9, 8, 3),
        (11, 8, 6),
        (24, 16, 12),
        (48, 16, 16),
        (41, 16, 14),
        (1040, 256, 208),
    ],
)
def test_blocks_are_divisors_or_nearly_fill_what_they_cover(length, most, expected):
    assert block_size(length, most) == expected


@pytest.mark.usefixtures("optimized")
def test_memory_grows_with_the_tokens_not_with_their_square():
    def temporaries(attend, T: int) -> int:
        shapes = ((1, T, 1, 1, 64), (1, 1, 64, T), (1, 1, T, 64), (1, T))
        q, k, v, p = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
        p = jax.ShapeDtypeStruct(p.shape, jnp.int32)
        run = jax.jit(lambda q, k, v, p: attend(q, k, v, Visibility(p, p)))
        return run.lower(q, k, v, p).compile().memory_analysis().temp_size_in_bytes

    blockwise = [temporaries(attend_blockwise, T) for T in (2048, 4096, 8192)]
    assert blockwise[2] - blockwise[1] <= 2.2 * (blockwise[1] - blockwise[0])
    assert temporaries(attend_dense, 4096) > 20 * blockwise[1]
