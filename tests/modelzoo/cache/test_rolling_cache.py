"""Layers with a window keep only their latest positions, whatever their slot held before.

Each slot is compared with a plain dictionary from positions to keys and values.
"""

from functools import partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import changed
from caches import CONFIG, SLOTS, H, K, keep, pieces, random_prompt, sides, used_cache
from covering import covering
from tolerances import FLOAT32_ELEMENTWISE

from noria.modelzoo.attention.attend import attend_dense
from noria.modelzoo.attention.segment_attention import Entries, attend_segments
from noria.modelzoo.cache import kv_cache
from noria.modelzoo.cache.kv_cache import KVCache
from noria.modelzoo.cache.layer_state import PromptKeysValues
from noria.modelzoo.cache.segments import EMPTY_POSITION
from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.layer_config import Chunk, Window

CUTS = [(24,), (4, 24), (2, 4, 8, 24), (5, 24)]
"""Spans above the windows, below them and equal to one."""
WINDOWS = (3, None, 5, 3)
ROLLING = changed(CONFIG, windows=WINDOWS)


keep_rolling = jax.jit(partial(keep, windows=WINDOWS))


def prompt_of(length: int, rows: int = 1):
    return random_prompt(rows, length, num_layers=len(WINDOWS))


def entries(cache: KVCache, layer: int, slot: int) -> dict[int, np.ndarray]:
    """Return a slot's `[2, K, H]` keys and values in one layer, by stored position."""
    positions = cache.positions.for_window(WINDOWS[layer])
    position_S = np.concatenate([np.asarray(segment[slot]) for segment in positions])
    keys, values = (side[slot] for side in sides(cache.layers[layer : layer + 1]))
    held = [s for s, position in enumerate(position_S) if position != EMPTY_POSITION]
    assert len(set(position_S[held])) == len(held)
    return {int(position_S[s]): np.stack([keys[:, s], values[:, s]]) for s in held}


def latest(tokens: dict[int, np.ndarray], window: int | None) -> dict[int, np.ndarray]:
    positions = sorted(tokens)
    return {p: tokens[p] for p in positions[-window if window else None :]}


def assert_same(got: dict[int, np.ndarray], expected: dict[int, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for position, entry in expected.items():
        np.testing.assert_array_equal(got[position], entry)


def tokens_of(prompt, layer: int, row: int, length: int) -> dict[int, np.ndarray]:
    keys, values = (side[row] for side in sides(prompt[layer : layer + 1]))
    return {p: np.stack([keys[:, p], values[:, p]]) for p in range(length)}


def assert_holds(cache: KVCache, layer: int, slot: int, tokens: dict[int, np.ndarray]) -> None:
    """Return the latest of these tokens; entries of earlier rows have later positions."""
    held = entries(cache, layer, slot)
    assert_same({p: held[p] for p in held if p < len(tokens)}, latest(tokens, WINDOWS[layer]))


@pytest.mark.parametrize(
    ("spans", "lengths"),
    covering(CUTS, [(2, 2), (3, 3), (4, 4), (5, 1), (12, 2), (12, 9), (12, 11), (24, 24)]),
    ids=str,
)
def test_a_whole_prompt_leaves_its_latest_tokens(spans, lengths):
    length, true_length = lengths
    before, prompt = used_cache(ROLLING, spans), prompt_of(length, rows=2)
    rows = pieces([SLOTS, 2], [length, true_length])
    after = keep_rolling(before, prompt, rows)
    for layer in range(len(WINDOWS)):
        tokens = tokens_of(prompt, layer, row=1, length=true_length)
        assert_holds(after, layer, 2, tokens)
        for slot in (0, 1, 3):
            assert_same(entries(after, layer, slot), entries(before, layer, slot))


@pytest.mark.parametrize(("spans", "chunk"), covering(CUTS, [1, 2, 4, 8]), ids=str)
def test_chunks_fill_a_slot_as_they_come(spans, chunk):
    """Each chunk ends at the end of a span at the latest; half of the last chunk is padding."""
    cache, prompt = used_cache(ROLLING, spans), prompt_of(24)
    held = [tokens_of(prompt, layer, 0, 24) for layer in range(len(WINDOWS))]
    cuts = sorted({*spans, *range(0, 24, chunk)})
    for start, end in pairwise(cuts):
        length = end if end < 24 else end - (end - start) // 2
        piece = [PromptKeysValues(k[..., start:end], v[..., start:end, :]) for k, v in prompt]
        num_segments = 1 + sum(end > span for span in spans)
        rows = pieces([2], [length - start], start)
        cache = cache.with_head(keep_rolling(cache.head(num_segments), piece, rows))
        for layer, tokens in enumerate(held):
            assert_holds(cache, layer, 2, {p: tokens[p] for p in range(length)})


@pytest.mark.parametrize(
    "spans",
    [pytest.param(cut, marks=[pytest.mark.slow] * (cut != CUTS[2])) for cut in CUTS],
    ids=str,
)
def test_appending_goes_round_and_round(spans):
    """Rows of different lengths run together, and each wraps its buffer several times."""
    prompt, lengths = prompt_of(12, rows=SLOTS), (1, 3, 7, 12)
    cache = keep_rolling(used_cache(ROLLING, spans), prompt, pieces(range(SLOTS), lengths))
    held = [
        [tokens_of(prompt, layer, slot, length) for slot, length in enumerate(lengths)]
        for layer in range(len(WINDOWS))
    ]
    step = jax.jit(append)
    for number in range(12):
        position_B = jnp.array(lengths) + number
        new = random_prompt(SLOTS, 1, number, len(WINDOWS))
        cache = step(cache, new, position_B)
        for layer in range(len(WINDOWS)):
            for slot, length in enumerate(lengths):
                held[layer][slot][length + number] = tokens_of(new, layer, slot, length=1)[0]
                assert_holds(cache, layer, slot, held[layer][slot])


def append(cache: KVCache, new, position_B) -> KVCache:
    """One token per row in every layer."""
    layers = tuple(
        kv_cache.append(kv, each, cache.positions.entry(position_B, window), jnp.int32(0))
        for kv, each, window in zip(cache.layers, new, WINDOWS, strict=True)
    )
    return KVCache(layers, kv_cache.append_position(cache.positions, position_B))


@pytest.mark.parametrize(
    ("spans", "position", "window"),
    covering(CUTS, [2, 4, 11, 12, 23], [3, Chunk(3)]),
    ids=str,
)
def test_a_rolling_buffer_gives_the_attention_of_a_whole_cache(spans, position, window):
    """The test compares a mask over all positions with a rolling buffer of the window's size."""
    prompt, new, length = prompt_of(24), prompt_of(1), jnp.array([position])
    # layer 1 keeps all, layer 3 has a rolling buffer: let them keep the same
    prompt, new = ((*each[:3], each[1]) for each in (prompt, new))
    cache = kv_cache.allocate(ROLLING, 1, spans, jnp.float32)
    cache = keep_rolling(cache, prompt, pieces([0], [position]))
    cache = jax.jit(append)(cache, new, length)
    q_BTKGH = jnp.asarray(np.random.default_rng(2).normal(size=(1, 1, K, 3, H)), jnp.float32)

    @partial(jax.jit, static_argnums=(0, 1))
    def attend(layer: int, kept_window: Window, cache: KVCache):
        keys_values = cache.layers[layer].read_layer(jnp.int32(0))
        entries = Entries(keys_values, cache.positions.for_window(kept_window))
        return attend_segments(attend_dense, window, q_BTKGH, length[:, None], entries)[0]

    whole = attend(1, None, cache)
    np.testing.assert_allclose(attend(3, window, cache), whole, rtol=0, atol=FLOAT32_ELEMENTWISE)


@pytest.mark.parametrize("num_segments", [1, 2, 3, 4])
def test_a_head_has_the_segments_below_its_span(num_segments):
    """With spans 2, 4, 8 and 24, a buffer of 3 ends in segment 2, a buffer of 5 in segment 3."""
    cache = used_cache(ROLLING, CUTS[2])
    head = cache.head(num_segments)
    lengths = {
        window: [segment.shape[1] for segment in head.positions.for_window(window)]
        for window in WINDOWS
    }
    expected = {3: [2, 1], None: [2, 2, 4, 16], 5: [2, 2, 1]}
    assert lengths == {window: of_all[:num_segments] for window, of_all in expected.items()}
    joined = cache.with_head(jax.tree.map(jnp.zeros_like, head))
    assert jax.tree.structure(joined) == jax.tree.structure(cache)
    is_zero = [[bool(np.all(x == 0)) for x in layer.arrays["v"]] for layer in joined.layers]
    assert is_zero == [
        [i < num_segments for i in range(len(expected[window]))] for window in WINDOWS
    ]


def num_bytes(config: DecoderConfig, spans: tuple[int, ...]) -> int:
    cache = jax.eval_shape(lambda: kv_cache.allocate(config, SLOTS, spans, jnp.float32))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


@pytest.mark.parametrize("spans", CUTS, ids=str)
@pytest.mark.parametrize(
    ("windows", "entries_of_layers", "entries_of_positions"),
    [
        ((3, None, 5, 3), (3, 24, 5, 3), (3, 24, 5)),
        ((3, 3), (3, 3), (3,)),
        ((Chunk(3), None, 3, Chunk(25)), (3, 24, 3, 24), (3, 24)),
        ((None, 24, 25), (24, 24, 24), (24,)),
        ((23,), (23,), (23,)),
    ],
)
def test_layers_take_the_bytes_of_their_windows_and_share_positions(
    spans, windows, entries_of_layers, entries_of_positions
):
    config = changed(CONFIG, windows=windows)
    keys_values = 2 * sum(entries_of_layers) * K * H * 4
    positions = sum(entries_of_positions) * 4
    assert num_bytes(config, spans) == SLOTS * (keys_values + positions)
