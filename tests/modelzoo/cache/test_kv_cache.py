"""The segmented cache against one plain numpy array for each slot."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import CONFIG, SLOTS, H, K, keep, pieces, random_prompt, sides, used_cache

from noria.modelzoo.attention.attend import attend_dense
from noria.modelzoo.attention.segment_attention import Entries, attend_segments
from noria.modelzoo.cache import kv_cache
from noria.modelzoo.cache.kv_cache import KVCache
from noria.modelzoo.cache.segments import EMPTY_POSITION

SPANS = (4, 8, 16)
CUTS = [(16,), (4, 8, 16), (1, 15, 16)]


def positions_of(cache: KVCache) -> np.ndarray:
    return np.concatenate([np.asarray(segment) for segment in cache.positions.whole_BS], axis=1)


def flat(cache: KVCache) -> list[np.ndarray]:
    """Return the positions, then keys and values of each layer."""
    return [positions_of(cache), *sides(cache.layers)]


@pytest.mark.parametrize("spans", CUTS, ids=str)
def test_an_empty_cache_is_zeros_that_hold_no_token(spans):
    positions, *arrays = flat(kv_cache.allocate(CONFIG, SLOTS, spans, jnp.float32))
    assert positions.shape == (SLOTS, 16) and np.all(positions == EMPTY_POSITION)
    assert len(arrays) == 2 * CONFIG.num_layers
    assert all(a.shape == (SLOTS, K, 16, H) and np.all(a == 0) for a in arrays)


WHOLE = [(spans, None, *sizes) for spans in CUTS for sizes in [(5, 3), (12, 9), (16, 16), (16, 1)]]
CHUNKS = [((16,), 5, 6, 4), ((4, 8, 16), 8, 8, 8), ((4, 8, 16), 10, 6, 1), ((1, 15, 16), 15, 1, 1)]


@pytest.mark.parametrize(("spans", "start", "length", "true_length"), WHOLE + CHUNKS, ids=str)
def test_a_piece_is_written_at_its_positions_and_nowhere_else(spans, start, length, true_length):
    """The rows' slots are in another order, and one row has no slot."""
    before, prompt = used_cache(CONFIG, spans), random_prompt(3, length)
    rows = pieces([2, SLOTS, 0], [true_length, length, length], start)
    after = jax.jit(keep)(before, prompt, rows)
    first = start or 0
    written = slice(first, first + length)
    expected_S = first + np.arange(length)
    positions, *arrays = map(np.copy, flat(before))
    positions[0, written] = expected_S
    positions[2, written] = np.where(np.arange(length) < true_length, expected_S, EMPTY_POSITION)
    for array, new in zip(arrays, sides(prompt), strict=True):
        array[2, :, written], array[0, :, written] = new[0], new[2]
    for new, expected in zip(flat(after), [positions, *arrays], strict=True):
        np.testing.assert_array_equal(new, expected)


@pytest.mark.parametrize("spans", CUTS, ids=str)
def test_append_writes_one_entry_a_row(spans):
    cache = kv_cache.allocate(CONFIG, SLOTS, spans, jnp.float32)
    rng = np.random.default_rng(5)
    model = flat(cache)
    for position in ([0, 3, 4, 15], [1, 0, 5, 7], [14, 8, 3, 4]):
        position_B = jnp.array(position)
        new = random_prompt(SLOTS, 1, seed=int(rng.integers(1000)))
        layers = tuple(
            jax.jit(kv_cache.append)(kv, each, position_B, jnp.int32(0))
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
    cache = used_cache(CONFIG, spans)
    position_B = jnp.array([position, 2, position, position])
    new = random_prompt(SLOTS, 1, seed=9)
    kv = kv_cache.append(cache.layers[0], new[0], position_B, jnp.int32(0))
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
        entries = Entries(cache.layers[0].read_layer(jnp.int32(0)), cache.positions.whole_BS)
        return attend_segments(attend_dense, window, q_BTKGH, position_B[:, None], entries)[0]

    return np.asarray(attend_step(cache, q_BTKGH, position_B))


@pytest.mark.usefixtures("optimized")
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("num_segments", [1, 2])
def test_segments_past_a_row_change_no_bit_of_its_attention(num_segments, window):
    empty = kv_cache.allocate(CONFIG, SLOTS, SPANS, jnp.float32)
    cache = keep(empty, random_prompt(SLOTS, 4), pieces(range(SLOTS), [1, 2, 3, 4]))
    q_BTKGH = jnp.asarray(np.random.default_rng(2).normal(size=(SLOTS, 1, K, 3, H)), jnp.float32)
    position_B = jnp.arange(SLOTS)
    short = attend(cache.head(num_segments), q_BTKGH, position_B, window)
    np.testing.assert_array_equal(short, attend(cache, q_BTKGH, position_B, window))


def test_a_head_put_back_gives_the_cache_again():
    cache = used_cache(CONFIG, SPANS)
    joined = cache.with_head(jax.tree.map(jnp.zeros_like, cache.head(2)))
    assert jax.tree.structure(joined) == jax.tree.structure(cache)
    for axis, new, old in zip((1, 2, 2, 2, 2), flat(joined), flat(cache), strict=True):
        new, old = np.moveaxis(new, axis, 0), np.moveaxis(old, axis, 0)
        assert np.all(new[:8] == 0) and np.array_equal(new[8:], old[8:])


def test_keys_and_values_are_kept_in_the_dtype_of_the_cache():
    cache = kv_cache.allocate(CONFIG, SLOTS, SPANS, jnp.bfloat16)
    new = random_prompt(SLOTS, 1)[0], jnp.full(SLOTS, 6), jnp.int32(0)
    for start in (None, 8):
        cache = keep(cache, random_prompt(1, 6), pieces([1], [5], start))
        kv = kv_cache.append(cache.layers[0], *new)
        dtypes = {a.dtype for a in jax.tree.leaves((cache.layers, kv))}
        assert dtypes == {jnp.dtype(jnp.bfloat16)}
