"""The cache in pages against plain numpy: every write changes the entries of its rows alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from caches import (
    CONFIG,
    ROWS,
    H,
    K,
    arrays_of,
    empty_cache,
    keep,
    layers_of,
    pieces,
    random_prompt,
    scattered,
    used_cache,
)

from noria.modelzoo.cache.layer_state import PromptKeysValues
from noria.modelzoo.cache.pages import NO_PAGE, append_to_pages, match_heads
from noria.modelzoo.cache.stripes import EMPTY_POSITION

LENGTH = 16
PAGES = (4, 16)
"""Sizes of pages, of which rows have four or one."""


def table(page: int) -> np.ndarray:
    return scattered(ROWS, LENGTH // page)


def sides(new: PromptKeysValues) -> dict[str, np.ndarray]:
    """Return new keys and values as `[rows, K, tokens, H]`."""
    return {"k": np.swapaxes(new.k_BKHT, 2, 3), "v": np.asarray(new.v_BKTH)}


def put(pages: np.ndarray, page_N: np.ndarray, position: int, entry_KH: np.ndarray) -> None:
    """Write one entry of a row to an array of pages."""
    size = pages.shape[3]
    pages[0, page_N[position // size], :, position % size] = entry_KH


def copies(cache) -> list[dict[str, np.ndarray]]:
    """Return the arrays of each layer, to be changed as the cache should be."""
    return [{name: x.copy() for name, x in arrays_of(layer).items()} for layer in layers_of(cache)]


def assert_holds(cache, expected: list[dict[str, np.ndarray]]) -> None:
    for layer, arrays in zip(layers_of(cache), expected, strict=True):
        for name, x in arrays_of(layer).items():
            np.testing.assert_array_equal(x, arrays[name])


@pytest.mark.parametrize("page", PAGES)
def test_an_empty_cache_is_zeros(page):
    layers = layers_of(empty_cache(CONFIG, table(page), page))
    assert len(layers) == CONFIG.num_layers
    for x in (x for layer in layers for x in arrays_of(layer).values()):
        assert x.shape == (1, 2 * ROWS * LENGTH // page, K, page, H) and not x.any()


WHOLE = [(None, 5, 3), (None, 12, 9), (None, 16, 16), (None, 16, 1), (None, 18, 7)]
CHUNKS = [(4, 4, 4), (8, 8, 5), (12, 4, 1), (6, 3, 2), (15, 1, 1), (0, 2, 2)]


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("piece", WHOLE + CHUNKS, ids=str)
def test_a_piece_is_written_at_its_positions_and_nowhere_else(page, piece):
    """The rows' slots are in another order, one row has no slot, and another not all pages.

    Padding is written, too, as far as a row has pages.
    """
    start, length, true_length = piece
    page_BN, first = table(page), start or 0
    page_BN[2, -(-(first + true_length) // page) :] = NO_PAGE
    before, prompt = used_cache(CONFIG, table(page), page=page), random_prompt(3, length)
    rows = pieces(page_BN, [2, ROWS, 0], [true_length, length, length], start)
    expected = copies(before)
    for arrays, new in zip(expected, prompt, strict=True):
        for name, side in sides(new).items():
            for row, slot in ((0, 2), (2, 0)):
                for offset in range(min(length, LENGTH - first)):
                    if page_BN[slot, (first + offset) // page] != NO_PAGE:
                        entry = side[row, :, offset]
                        put(arrays[name], page_BN[slot], first + offset, entry)
    assert_holds(jax.jit(keep)(before, prompt, rows), expected)


append = jax.jit(append_to_pages)


@pytest.mark.parametrize("page", PAGES)
def test_append_writes_one_entry_a_row(page):
    """Rows without a token write nothing."""
    page_BN = table(page)
    cache = used_cache(CONFIG, page_BN, page=page)
    (layer, _), (expected, _) = layers_of(cache), copies(cache)
    turns = ([0, 3, EMPTY_POSITION, 15], [1, 0, 5, 7], [14, EMPTY_POSITION, 3, 4])
    for seed, positions in enumerate(turns):
        new, _ = random_prompt(ROWS, 1, seed=seed)
        layer = append(layer, new, jnp.asarray(page_BN), jnp.array(positions), jnp.int32(0))
        for row, position in enumerate(positions):
            for name, side in sides(new).items():
                if position != EMPTY_POSITION:
                    put(expected[name], page_BN[row], position, side[row, :, 0])
    assert_holds(layer, [expected])


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("position", [0, 15, 16, EMPTY_POSITION])
def test_a_row_without_a_page_or_a_token_writes_nothing(page, position):
    """Position 16 is past the pages of every row."""
    page_BN = table(page)
    cache = used_cache(CONFIG, page_BN, page=page)
    (layer, _), (expected, _) = layers_of(cache), copies(cache)
    if position in (0, 15):
        page_BN[[0, 2, 3]] = NO_PAGE
    new, _ = random_prompt(ROWS, 1, seed=9)
    position_B = jnp.array([position, 2, position, position])
    for name, side in sides(new).items():
        put(expected[name], page_BN[1], 2, side[1, :, 0])
    assert_holds(append(layer, new, jnp.asarray(page_BN), position_B, jnp.int32(0)), [expected])


def test_keys_and_values_are_kept_in_the_dtype_of_the_cache():
    page_BN = table(4)
    cache = empty_cache(CONFIG, page_BN, dtype="bfloat16")
    for start in (None, 6):
        cache = keep(cache, random_prompt(1, 6), pieces(page_BN, [1], [5], start))
        one_token = random_prompt(ROWS, 1)[0], jnp.asarray(page_BN), jnp.full(ROWS, 6)
        layer = append(layers_of(cache)[0], *one_token, jnp.int32(0))
        dtypes = {x.dtype for x in jax.tree.leaves((cache, layer))}
        assert dtypes == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("num_tokens", [1, 8, 11])
@pytest.mark.parametrize(("num_heads", "stored"), [(2, 2), (2, 6), (3, 6), (1, 8), (6, 2)])
def test_heads_are_repeated_or_their_copies_dropped(num_heads, stored, num_tokens):
    """A device may have any of the copies, so all copies of a head are the same here."""
    fewest, most = sorted((num_heads, stored))
    values = np.random.default_rng(0).normal(size=(3, fewest, num_tokens, 4)).astype(np.float32)
    few, many = values, np.repeat(values, most // fewest, axis=1)
    new, wanted = (many, few) if num_heads < stored else (few, many)
    got = match_heads(PromptKeysValues(new.swapaxes(2, 3), new), num_heads)
    np.testing.assert_array_equal(got.k_BKHT, wanted.swapaxes(2, 3))
    np.testing.assert_array_equal(got.v_BKTH, wanted)
