"""The segmented cache against one plain numpy array a slot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import CONFIG, SLOTS, H, K, filled_with_nan, random_prompt, sides

from noria.modelzoo import kv_cache
from noria.modelzoo.attention import EMPTY_POSITION, attend_dense
from noria.modelzoo.kv_cache import KVCache
from noria.modelzoo.segment_attention import attend_cached

SPANS = (4, 8, 16)
CUTS = [(16,), (4, 8, 16), (1, 15, 16)]


def positions_of(cache: KVCache) -> np.ndarray:
    return np.concatenate([np.asarray(segment) for segment in cache.positions.whole_BS], axis=1)


def flat(cache: KVCache) -> list[np.ndarray]:
    """Positions, then keys and values of each layer."""
    return [positions_of(cache), *sides(cache.layers)]


@pytest.mark.parametrize("spans", CUTS, ids=str)
def test_an_empty_cache_is_zeros_that_hold_no_token(spans):
    positions, *arrays = flat(kv_cache.allocate(CONFIG, SLOTS, spans, jnp.float32))
    assert positions.shape == (SLOTS, 16) and np.all(positions == EMPTY_POSITION)
    assert len(arrays) == 2 * CONFIG.num_layers
    assert all(a.shape == (SLOTS, K, 16, H) and np.all(a == 0) for a in arrays)


@pytest.mark.parametrize("spans", CUTS, ids=str)
@pytest.mark.parametrize(("length", "true_length"), [(5, 5), (5, 3), (12, 9), (16, 16), (16, 1)])
def test_insert_rewrites_its_slot_whole_and_no_other(spans, length, true_length):
    empty = kv_cache.allocate(CONFIG, SLOTS, spans, jnp.float32)
    before = filled_with_nan(empty)
    prompt = random_prompt(2, length)
    lengths_B = jnp.array([length, true_length])
    after = jax.jit(kv_cache.insert)(before, prompt, lengths_B, jnp.int32(1), jnp.int32(2))
    positions, *arrays = flat(after)

    expected_S = [i if i < true_length else EMPTY_POSITION for i in range(16)]
    np.testing.assert_array_equal(positions[2], expected_S)
    for array, new in zip(arrays, sides(prompt), strict=True):
        expected_KSH = np.zeros((K, 16, H), np.float32)
        expected_KSH[:, :length] = new[1]
        np.testing.assert_array_equal(array[2], expected_KSH)
    for new, old in zip(flat(after), flat(before), strict=True):
        np.testing.assert_array_equal(np.delete(new, 2, axis=0), np.delete(old, 2, axis=0))


@pytest.mark.parametrize("spans", CUTS, ids=str)
def test_append_writes_one_entry_a_row(spans):
    cache = kv_cache.allocate(CONFIG, SLOTS, spans, jnp.float32)
    rng = np.random.default_rng(5)
    model = flat(cache)
    for position in ([0, 3, 4, 15], [1, 0, 5, 7], [14, 8, 3, 4]):
        position_B = jnp.array(position)
        new = random_prompt(SLOTS, 1, seed=int(rng.integers(1000)))
        layers = tuple(
            jax.jit(kv_cache.append)(kv, each, position_B)
            for kv, each in zip(cache.layers, new, strict=True)
        )
        cache = KVCache(layers, kv_cache.append_position(cache.positions, position_B))
        for row, index in enumerate(position):
            model[0][row, index] = index
            for array, side in zip(model[1:], sides(new), strict=True):
                array[row, :, index] = side[row, :, 0]
    for ours, expected in zip(flat(cache), model, strict=True):
        np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("spans", CUTS, ids=str)
@pytest.mark.parametrize("position", [16, 17, 2**30, -1, -16])
def test_append_past_the_segments_writes_nothing(spans, position):
    prompt = random_prompt(SLOTS, 16)
    cache = kv_cache.allocate(CONFIG, SLOTS, spans, jnp.float32)
    for slot in range(SLOTS):
        rows = jnp.full(SLOTS, 16), jnp.int32(slot), jnp.int32(slot)
        cache = kv_cache.insert(cache, prompt, *rows)
    position_B = jnp.array([position, 2, position, position])
    new = random_prompt(SLOTS, 1, seed=9)
    kv = kv_cache.append(cache.layers[0], new[0], position_B)
    positions = kv_cache.append_position(cache.positions, position_B)
    idle = [0, 2, 3]
    after = cache._replace(positions=positions)
    np.testing.assert_array_equal(positions_of(after), positions_of(cache))
    triples = zip(sides([kv]), sides(cache.layers[:1]), sides(new[:1]), strict=True)
    for ours, old, side in triples:
        np.testing.assert_array_equal(ours[idle], old[idle])
        np.testing.assert_array_equal(ours[1, :, 2], side[1, :, 0])


def attend(cache: KVCache, q_BTKGH, position_B, window) -> np.ndarray:
    @jax.jit
    def attend_step(cache, q_BTKGH, position_B):
        return attend_cached(
            attend_dense,
            q_BTKGH,
            cache.layers[0],
            position_B[:, None],
            cache.positions.whole_BS,
            window,
        )

    return np.asarray(attend_step(cache, q_BTKGH, position_B))


@pytest.mark.parametrize("window", [None, 3, 7])
def test_a_slot_never_sees_its_predecessor(window):
    """The predecessor leaves NaN everywhere; one NaN that is read, even masked, would spread."""
    prompt = random_prompt(1, 6)
    q_BTKGH = jnp.asarray(np.random.default_rng(2).normal(size=(SLOTS, 1, K, 3, H)), jnp.float32)
    empty = kv_cache.allocate(CONFIG, SLOTS, SPANS, jnp.float32)
    row = jnp.array([5]), jnp.int32(0), jnp.int32(1)
    clean = kv_cache.insert(empty, prompt, *row)
    reused = kv_cache.insert(filled_with_nan(empty), prompt, *row)
    position_B = jnp.array([4, 4, 4, 4])
    expected = attend(clean, q_BTKGH, position_B, window)[1]
    assert np.all(np.isfinite(expected))
    np.testing.assert_array_equal(attend(reused, q_BTKGH, position_B, window)[1], expected)


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("num_segments", [1, 2])
def test_segments_past_a_row_change_no_bit_of_its_attention(num_segments, window):
    prompt = random_prompt(SLOTS, 4)
    cache = kv_cache.allocate(CONFIG, SLOTS, SPANS, jnp.float32)
    for slot in range(SLOTS):
        rows = jnp.full(SLOTS, slot + 1), jnp.int32(slot), jnp.int32(slot)
        cache = kv_cache.insert(cache, prompt, *rows)
    q_BTKGH = jnp.asarray(np.random.default_rng(2).normal(size=(SLOTS, 1, K, 3, H)), jnp.float32)
    position_B = jnp.arange(SLOTS)
    short = attend(cache.head(num_segments), q_BTKGH, position_B, window)
    np.testing.assert_array_equal(short, attend(cache, q_BTKGH, position_B, window))


def test_a_head_put_back_gives_the_cache_again():
    cache = filled_with_nan(kv_cache.allocate(CONFIG, SLOTS, SPANS, jnp.float32))
    changed = jax.tree.map(jnp.zeros_like, cache.head(2))
    joined = cache.with_head(changed)
    assert jax.tree.structure(joined) == jax.tree.structure(cache)
    for array in flat(joined)[1:]:
        assert np.all(array[:, :, :8] == 0) and np.all(np.isnan(array[:, :, 8:]))
    assert np.all(flat(joined)[0][:, :8] == 0) and np.all(flat(joined)[0][:, 8:] == 1)


def test_keys_and_values_are_kept_in_the_dtype_of_the_cache():
    cache = kv_cache.allocate(CONFIG, SLOTS, SPANS, jnp.bfloat16)
    row = jnp.array([5]), jnp.int32(0), jnp.int32(1)
    cache = kv_cache.insert(cache, random_prompt(1, 6), *row)
    kv = kv_cache.append(cache.layers[0], random_prompt(SLOTS, 1)[0], jnp.full(SLOTS, 6))
    assert {a.dtype for a in jax.tree.leaves((cache.layers, kv))} == {jnp.dtype(jnp.bfloat16)}
