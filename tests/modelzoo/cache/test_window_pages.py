"""Layers with a window may have a few pages for each slot, whatever the slot held before.

The memory of such a layer does not grow with its rows, and its answers are those of attention over
the window. Each slot is compared with a plain dictionary from positions to keys and values.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import changed
from caches import (
    CONFIG,
    ROWS,
    H,
    K,
    empty_cache,
    entries_of,
    keep,
    layers_of,
    pages_in,
    pieces,
    random_prompt,
    scattered,
    used_cache,
    with_layers,
)
from covering import covering

from noria.modelzoo.attention.paged import PagedRows, attend_in_groups
from noria.modelzoo.cache.layer_state import LayerState, PromptKeysValues
from noria.modelzoo.cache.pages import append_to_pages
from noria.modelzoo.layer_config import Chunk

LONGEST = 24
PAGES = (2, 4, 8)
"""Sizes of pages: below the windows, between them and above them."""
WINDOWS = (3, None, 5, 3)
WINDOWED = changed(CONFIG, windows=WINDOWS)
Tokens = dict[int, np.ndarray]

write = jax.jit(keep)


def table(page: int, rows: int = ROWS) -> np.ndarray:
    return scattered(rows, LONGEST // page)


def prompt_of(length: int, rows: int = 1) -> tuple[PromptKeysValues, ...]:
    return random_prompt(rows, length, num_layers=len(WINDOWS))


def tokens_of(prompt, layer: int, row: int, length: int) -> Tokens:
    keys, values = (np.asarray(x[row]) for x in prompt[layer])
    return {p: np.stack([keys[..., p], values[:, p]]) for p in range(length)}


def held(cache, layer: int, slot: int, page: int) -> np.ndarray:
    """Return the entries of a slot as its pages in turn give them, `[2, K, positions, H]`."""
    of_rows = entries_of(layers_of(cache)[layer], table(page)[[slot]], np.array([slot]))
    return np.stack([of_rows[name][0] for name in ("k", "v")])


def assert_holds(cache, layer: int, slot: int, tokens: Tokens, page: int, count: int = 1) -> None:
    """Compare what the last `count` of these tokens and the next one see; all without a window."""
    found, seen = held(cache, layer, slot, page), sorted(tokens)
    if (window := WINDOWS[layer]) is not None:
        seen = seen[-(window + count - 1) :]
    for position in seen:
        np.testing.assert_array_equal(found[:, :, position], tokens[position])


@pytest.mark.parametrize(
    ("page", "lengths"),
    covering(PAGES, [(2, 2), (3, 3), (4, 4), (5, 1), (12, 2), (12, 9), (12, 11), (24, 24)]),
    ids=str,
)
def test_a_whole_prompt_leaves_its_latest_tokens(page, lengths):
    length, true_length = lengths
    before = used_cache(WINDOWED, table(page), page=page, row_tokens=1)
    prompt = prompt_of(length, rows=2)
    after = write(before, prompt, pieces(table(page), [ROWS, 2], [length, true_length]))
    for layer in range(len(WINDOWS)):
        tokens = tokens_of(prompt, layer, row=1, length=true_length)
        assert_holds(after, layer, 2, tokens, page)
        for slot in (0, 1, 3):
            old, new = (held(cache, layer, slot, page) for cache in (before, after))
            np.testing.assert_array_equal(new, old)


@pytest.mark.parametrize(("page", "chunk"), covering(PAGES, [1, 2, 4, 8]), ids=str)
def test_chunks_fill_a_slot_as_they_come(page, chunk):
    """A chunk is written before it attends: what its first token sees is still there."""
    cache = used_cache(WINDOWED, table(page), page=page, row_tokens=chunk)
    prompt = prompt_of(LONGEST)
    whole = [tokens_of(prompt, layer, 0, LONGEST) for layer in range(len(WINDOWS))]
    for start in range(0, LONGEST, chunk):
        end = start + chunk
        # half of the last chunk is padding
        count = chunk if end < LONGEST else -(-chunk // 2)
        piece = [PromptKeysValues(k[..., start:end], v[..., start:end, :]) for k, v in prompt]
        cache = write(cache, piece, pieces(table(page), [2], [count], start))
        for layer, tokens in enumerate(whole):
            written = {p: tokens[p] for p in range(start + count)}
            assert_holds(cache, layer, 2, written, page, count)


def append(cache, new, page_BN: np.ndarray, position_B: jax.Array):
    """One token per row in every layer."""

    def append_layer(layer: LayerState, new: PromptKeysValues) -> LayerState:
        pages = jnp.asarray(pages_in(layer, page_BN, np.arange(len(page_BN))))
        return append_to_pages(layer, new, pages, position_B, jnp.int32(0))

    return with_layers(cache, map(append_layer, layers_of(cache), new))


@pytest.mark.parametrize("page", PAGES)
def test_appending_goes_round_and_round(page):
    """Rows of different lengths run together, and each returns to its first page several times."""
    prompt, lengths = prompt_of(12, rows=ROWS), (1, 3, 7, 12)
    cache = used_cache(WINDOWED, table(page), page=page, row_tokens=1)
    cache = write(cache, prompt, pieces(table(page), range(ROWS), lengths))
    tokens = [
        [tokens_of(prompt, layer, slot, length) for slot, length in enumerate(lengths)]
        for layer in range(len(WINDOWS))
    ]
    step = jax.jit(partial(append, page_BN=table(page)))
    for number in range(12):
        new = random_prompt(ROWS, 1, number, len(WINDOWS))
        cache = step(cache, new, position_B=jnp.array(lengths) + number)
        for layer in range(len(WINDOWS)):
            for slot, length in enumerate(lengths):
                tokens[layer][slot][length + number] = tokens_of(new, layer, slot, length=1)[0]
                assert_holds(cache, layer, slot, tokens[layer][slot], page)


@pytest.mark.parametrize(
    ("page", "position", "window"),
    covering(PAGES, [2, 4, 11, 12, 23], [3, Chunk(3)]),
    ids=str,
)
def test_pages_of_a_slot_give_the_bits_of_attention_to_all_pages(page, position, window):
    """A mask over all entries is compared with the few pages that a window needs."""
    prompt, new, page_BN = prompt_of(LONGEST), prompt_of(1), table(page, rows=1)
    # layer 1 keeps all, layer 3 has pages of slots: let them keep the same
    prompt, new = ((*each[:3], each[1]) for each in (prompt, new))
    cache = empty_cache(WINDOWED, page_BN, page=page, row_tokens=1)
    cache = write(cache, prompt, pieces(page_BN, [0], [position]))
    cache = append(cache, new, page_BN, jnp.array([position]))
    q_BTKGH = jnp.asarray(np.random.default_rng(2).normal(size=(1, 1, K, 3, H)), jnp.float32)

    @jax.jit
    def attend(layer: LayerState):
        pages = jnp.asarray(pages_in(layer, page_BN, np.array([0])))
        rows = PagedRows(pages, jnp.array([position]), jnp.ones(1, jnp.int32))
        return attend_in_groups(q_BTKGH, *layer.keys_values(), rows, window)

    _, whole, _, of_slots = layers_of(cache)
    assert whole.spec.slot_pages == 0 < of_slots.spec.slot_pages < LONGEST // page
    for got, expected in zip(attend(of_slots), attend(whole), strict=True):
        np.testing.assert_array_equal(got, expected)


def layer_bytes(windows, length: int, page: int, row_tokens: int) -> list[int]:
    config, page_BN = changed(CONFIG, windows=windows), scattered(ROWS, -(-length // page))
    allocate = partial(empty_cache, config, page_BN, page, row_tokens)
    return [
        sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layer))
        for layer in layers_of(jax.eval_shape(allocate))
    ]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("row_tokens", [1, 4])
@pytest.mark.parametrize(
    "windows", [(3, None, 5, 3), (3, 3), (Chunk(3), None, 3, Chunk(25)), (None, 24, 25), (23,)]
)
def test_the_memory_of_a_window_does_not_grow_with_the_rows(page, row_tokens, windows):
    """Pages hold a window and the tokens of a call wherever they begin in a page, and no more."""
    token = 2 * K * H * 4
    for length in (48, 480):
        for window, found in zip(
            windows, layer_bytes(windows, length, page, row_tokens), strict=True
        ):
            if window is None:
                assert found == 2 * ROWS * length * token
                continue
            size = window.size if isinstance(window, Chunk) else window
            last = size - 1 + row_tokens - 1
            # the pages that contain positions first to first + last
            counts = {(first + last) // page - first // page + 1 for first in range(page)}
            assert found == ROWS * max(counts) * page * token


@pytest.mark.parametrize("page", PAGES)
def test_a_window_as_long_as_rows_takes_pages_of_the_pool(page):
    (cache,) = layers_of(
        empty_cache(changed(CONFIG, windows=(LONGEST,)), table(page), page, row_tokens=1)
    )
    assert cache.spec.slot_pages == 0 and cache.num_pages == 2 * table(page).size
