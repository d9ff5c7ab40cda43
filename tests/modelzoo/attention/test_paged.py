"""Attention to pages: a row sees its own entries alone, whatever the other pages hold."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tolerances import FLOAT32_ELEMENTWISE

from noria.modelzoo.attention.paged import PagedRows, attend_in_groups
from noria.modelzoo.layer_config import Chunk, Scores

PAGE, K, G, H, NUM_PAGES, ROW_PAGES = 4, 2, 3, 8, 64, 5
LENGTHS = (1, 4, 5, 0, 13, 20, 7)


def expected(q_KGH, k_KSH, v_KSH, position, window, scores):
    """Attention of one query in float64 over the entries that it sees."""
    first = 0
    if isinstance(window, Chunk):
        first = position - position % window.size
    elif window is not None:
        first = max(0, position - window + 1)
    k_KSH, v_KSH = (x[:, first : position + 1].astype(np.float64) for x in (k_KSH, v_KSH))
    scale = H**-0.5 if scores.scale is None else scores.scale
    score_KGS = np.einsum("KGH,KSH->KGS", q_KGH, k_KSH) * scale
    if scores.cap is not None:
        score_KGS = np.tanh(score_KGS / scores.cap) * scores.cap
    weight_KGS = np.exp(score_KGS)
    total_KG1 = weight_KGS.sum(-1, keepdims=True)
    return np.einsum("KGS,KSH->KGH", weight_KGS / total_KG1, v_KSH), np.log(total_KG1[..., 0])


class Pool:
    """Random rows, and their entries in the pages of a pool that is NaN elsewhere."""

    def __init__(self, seed: int = 0, order: int = 0):
        rng = np.random.default_rng(seed)
        size = ROW_PAGES * PAGE
        self.q_BTKGH = rng.normal(size=(len(LENGTHS), 1, K, G, H)).astype(np.float32)
        self.k_BKSH, self.v_BKSH = rng.normal(size=(2, len(LENGTHS), K, size, H))
        order_P = np.random.default_rng(order).permutation(NUM_PAGES)
        self.page_BN = order_P[: len(LENGTHS) * ROW_PAGES].reshape(len(LENGTHS), ROW_PAGES)
        self.pages = [np.full((NUM_PAGES, K, PAGE, H), np.nan, np.float32) for _ in range(2)]
        for row, length in enumerate(LENGTHS):
            for n in range(-(-length // PAGE)):
                entries = slice(n * PAGE, (n + 1) * PAGE)
                for pages, x_BKSH in zip(self.pages, (self.k_BKSH, self.v_BKSH), strict=True):
                    pages[self.page_BN[row, n]] = x_BKSH[row, :, entries]

    def attend(self, rows=slice(None), **options):
        page_BN, position_B = self.page_BN[rows], np.array(LENGTHS)[rows] - 1
        paged = PagedRows(*map(jnp.asarray, (page_BN, position_B, position_B >= 0)))
        attend = jax.jit(partial(attend_in_groups, **options))
        out, lse = attend(self.q_BTKGH[rows], *map(jnp.asarray, self.pages), rows=paged)
        return np.asarray(out), np.asarray(lse)


@pytest.mark.parametrize("group", [None, 2, 8])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 6},
        {"window": Chunk(8)},
        {"scores": Scores(scale=0.3, cap=2.0)},
    ],
    ids=str,
)
def test_each_row_attends_to_its_own_entries(options, group):
    pool = Pool()
    out_BTKGH, lse_BTKG = pool.attend(group=group, **options)
    for row, length in enumerate(LENGTHS):
        if not length:
            continue
        window, scores = options.get("window"), options.get("scores", Scores())
        entries = pool.k_BKSH[row], pool.v_BKSH[row]
        out, lse = expected(pool.q_BTKGH[row, 0], *entries, length - 1, window, scores)
        np.testing.assert_allclose(out_BTKGH[row, 0], out, rtol=0, atol=FLOAT32_ELEMENTWISE)
        np.testing.assert_allclose(lse_BTKG[row, 0], lse, rtol=0, atol=FLOAT32_ELEMENTWISE)


def test_a_row_without_tokens_sees_nothing():
    out_BTKGH, lse_BTKG = Pool().attend()
    row = LENGTHS.index(0)
    assert not out_BTKGH[row].any() and (lse_BTKG[row] == -np.inf).all()


@pytest.mark.parametrize("group", [None, 2])
def test_bits_of_a_row_do_not_depend_on_pages_or_neighbours(group):
    is_row_B = np.array(LENGTHS) > 0
    first = Pool().attend(group=group)
    other_pages = Pool(order=1).attend(group=group)
    reversed_rows = Pool().attend(rows=slice(None, None, -1), group=group)
    for own, paged, moved in zip(first, other_pages, reversed_rows, strict=True):
        assert np.array_equal(paged[is_row_B], own[is_row_B])
        assert np.array_equal(moved[::-1][is_row_B], own[is_row_B])
