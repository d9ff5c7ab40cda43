"""Kernels that read live pages, and their portable form, against a plain reference in numpy."""

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from coded_entries import decode, encode
from jax.experimental.pallas import tpu as pltpu
from mosaic_interpreter import interpreted_on_cpu
from tolerances import BFLOAT16_ELEMENTWISE, BFLOAT16_ELEMENTWISE_RELATIVE, FLOAT32_ELEMENTWISE

from noria.modelzoo.attention.paged import PagedRows, attend_in_groups
from noria.modelzoo.cache.entry_codes import EntryCodes
from noria.modelzoo.kernels.call import AttentionCall
from noria.modelzoo.kernels.paged_gpu import attend_pages_gpu, paged_gpu_refusal
from noria.modelzoo.kernels.paged_tpu import MAX_TABLE, attend_pages_tpu, paged_tpu_refusal
from noria.modelzoo.layer_config import PLAIN_SCORES, BothSides, Chunk, Scores, Window

PAGE = 64
LENGTHS = (70, 0, 6, 133)
"""The entries of each row before its first query's own one; the second row has no tokens."""
EMPTY = 1
NUM_POOL = 24
"""Pages of the pool, more than the rows use."""


class Case(NamedTuple):
    """Sizes and options of a call."""

    T: int = 1
    K: int = 1
    G: int = 2
    H: int = 128
    page: int = PAGE
    window: Window = None
    scores: Scores = PLAIN_SCORES
    dtype: str = "float32"
    codes: str | None = None
    splits: tuple[int, ...] = ()
    is_latent: bool = False


class Kernel(NamedTuple):
    """An implementation, the cases that it serves, and where it runs."""

    attend: Any
    serves: set[str]
    context: Any = nullcontext
    rest: float = np.nan
    """The value of entries that no query sees."""


CASES = {
    "plain": Case(),
    "bfloat16": Case(dtype="bfloat16", T=3, K=2, window=20, scores=Scores(0.1, 2.0)),
    "windows": Case(T=2, window=50),
    "chunks": Case(T=8, window=Chunk(96), scores=Scores(cap=0.7)),
    "many heads": Case(K=3, G=5, H=256),
    "heads of 64": Case(dtype="bfloat16", H=64, T=8, G=8),
    "large pages": Case(dtype="float16", page=128, T=2),
    "int8": Case(codes="int8", K=2, T=2, window=30),
    "float8": Case(codes="float8_e4m3fn", page=128, G=4),
    "latents": Case(is_latent=True, G=16, H=256),
    "latents in codes": Case(is_latent=True, G=16, H=256, codes="int8", splits=(128,)),
}
ON_GPU = {"bfloat16", "heads of 64", "large pages"}
KERNELS = {
    "portable": Kernel(
        partial(attend_in_groups, group=2),
        set(CASES),
        # it multiplies entries of a row's last page by zero, so a pool is cleared of NaN
        rest=5.0,
    ),
    "tpu": Kernel(
        attend_pages_tpu,
        set(CASES) - {"heads of 64", "large pages"},
        pltpu.force_tpu_interpret_mode,
    ),
    "gpu": Kernel(attend_pages_gpu, ON_GPU, interpreted_on_cpu),
}
OFTEN = {("tpu", "windows"), ("portable", "bfloat16"), ("portable", "chunks")}
"""Pairs of every run: interpreters are slow. The test of bits runs both kernels."""


class Inputs(NamedTuple):
    """Queries and entries of rows, `k_BKSH` and `v_BKSH` at the positions of their last axis."""

    q_BTKGH: np.ndarray
    k_BKSH: np.ndarray
    v_BKSH: np.ndarray
    position_BT: np.ndarray


def inputs(case: Case, seed: int = 0) -> Inputs:
    rng, B = np.random.default_rng(seed), len(LENGTHS)
    S = -(-(max(LENGTHS) + case.T) // case.page) * case.page
    q = rng.normal(size=(B, case.T, case.K, case.G, case.H))
    k, v = rng.normal(size=(2, B, case.K, S, case.H))
    position_BT = np.array(LENGTHS)[:, None] + np.arange(case.T)
    position_BT[EMPTY] = -1
    dtype = np.dtype(case.dtype)
    q, k, v = (x.astype(dtype) for x in (q, k, k if case.is_latent else v))
    return Inputs(q, k, v, position_BT)


def in_pages(x_BKSH: np.ndarray, page_BN: np.ndarray, last_B: np.ndarray, rest: Any) -> np.ndarray:
    """Return a pool whose entries after the last one of each row are `rest`."""
    B, K, S, *features = x_BKSH.shape
    is_entry_BS = np.arange(S) <= last_B[:, None]
    shown = is_entry_BS.reshape(B, 1, S, *(1 for _ in features))
    x_BKSH = np.where(shown, x_BKSH, np.asarray(rest, x_BKSH.dtype))
    N = page_BN.shape[1]
    pool = np.full((NUM_POOL, K, S // N, *features), rest, x_BKSH.dtype)
    pool[page_BN] = x_BKSH.reshape(B, K, N, S // N, *features).swapaxes(1, 2)
    return pool


def pool_of(x: np.ndarray, case: Case, page_BN: np.ndarray, last_B: np.ndarray, rest: float) -> Any:
    """Return the pages of keys or values; `rest` is what free entries hold."""
    if case.codes is None:
        return jnp.asarray(in_pages(x, page_BN, last_B, rest))
    codes, scales = encode(x, 3, case.codes, np.dtype("float32"), case.splits)
    scale_PKSR = in_pages(np.stack(scales, axis=3), page_BN, last_B, rest)
    return EntryCodes(
        jnp.asarray(in_pages(codes, page_BN, last_B, 3)),
        jnp.asarray(scale_PKSR.swapaxes(2, 3)),
        case.splits,
    )


def program(kernel: Kernel, case: Case) -> Any:
    """Return the compiled kernel, as a function of inputs, pages and what free entries hold."""

    @jax.jit
    def run(q_BTKGH: Any, k_PKSH: Any, v_PKSH: Any, rows: PagedRows) -> Any:
        v_PKSH = k_PKSH if case.is_latent else v_PKSH
        return kernel.attend(q_BTKGH, k_PKSH, v_PKSH, rows, case.window, case.scores)

    def attended(given: Inputs, page_BN: np.ndarray, rest: float = kernel.rest) -> list[np.ndarray]:
        last_B = given.position_BT.max(axis=1)
        k, v = (pool_of(x, case, page_BN, last_B, rest) for x in (given.k_BKSH, given.v_BKSH))
        first_B, count_B = given.position_BT[:, 0], (given.position_BT >= 0).sum(axis=1)
        rows = PagedRows(*(jnp.asarray(x, jnp.int32) for x in (page_BN, first_B, count_B)))
        with kernel.context():
            found = run(jnp.asarray(given.q_BTKGH), k, v, rows)
        return [np.asarray(x) for x in found]

    return attended


def table(case: Case, seed: int = 0) -> np.ndarray:
    shape = len(LENGTHS), -(-(max(LENGTHS) + case.T) // case.page)
    return np.random.default_rng(seed).permutation(NUM_POOL)[: np.prod(shape)].reshape(shape)


def first_seen(position: int, window: Window) -> int:
    if window is None:
        return 0
    if isinstance(window, Chunk):
        return position // window.size * window.size
    return max(position - window + 1, 0)


def expected(given: Inputs, case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return `out` and `lse` in float64, one query at a time."""
    k, v = (x.astype(np.float64) for x in (given.k_BKSH, given.v_BKSH))
    if case.codes is not None:
        k, v = (
            decode(*encode(x, 3, case.codes, np.dtype("float32"), case.splits), 3, case.splits)
            for x in (given.k_BKSH, given.v_BKSH)
        )
    out = np.zeros(given.q_BTKGH.shape)
    lse = np.full(out.shape[:-1], -np.inf)
    scale = case.H**-0.5 if case.scores.scale is None else case.scores.scale
    for b, t in np.ndindex(*given.position_BT.shape):
        if (position := int(given.position_BT[b, t])) < 0:
            continue
        seen = slice(first_seen(position, case.window), position + 1)
        q_KGH = given.q_BTKGH[b, t].astype(np.float64)
        scores = np.einsum("kgh,ksh->kgs", q_KGH, k[b, :, seen]) * scale
        if case.scores.cap is not None:
            scores = np.tanh(scores / case.scores.cap) * case.scores.cap
        lse[b, t] = np.log(np.exp(scores).sum(axis=-1))
        weights = np.exp(scores - lse[b, t][..., None])
        out[b, t] = np.einsum("kgs,ksh->kgh", weights, v[b, :, seen])
    return out, lse


@pytest.mark.parametrize(
    ("name", "case_name"),
    [
        pytest.param(name, case, marks=[] if (name, case) in OFTEN else [pytest.mark.slow])
        for name, kernel in KERNELS.items()
        for case in CASES
        if case in kernel.serves
    ],
)
def test_it_equals_the_reference(name, case_name):
    """Entries that no query sees are not read, and neither are free pages."""
    case, given = CASES[case_name], inputs(CASES[case_name])
    out, lse = program(KERNELS[name], case)(given, table(case))
    wanted_out, wanted_lse = expected(given, case)
    assert out.dtype == np.dtype(case.dtype) and lse.dtype == np.float32
    assert (out[EMPTY] == 0).all() and np.isneginf(lse[EMPTY]).all()
    # a latent in codes: the features after the first part are undefined
    features = slice(case.splits[0]) if case.is_latent and case.splits else slice(None)
    exact = case.dtype == "float32"
    rtol = 0 if exact else BFLOAT16_ELEMENTWISE_RELATIVE
    atol = FLOAT32_ELEMENTWISE if exact else BFLOAT16_ELEMENTWISE + BFLOAT16_ELEMENTWISE_RELATIVE
    np.testing.assert_allclose(
        out[..., features].astype(np.float64), wanted_out[..., features], atol=atol, rtol=rtol
    )
    np.testing.assert_allclose(lse, wanted_lse, atol=atol, rtol=rtol)


@pytest.mark.parametrize(
    ("name", "case_name"), [("portable", "plain"), ("tpu", "plain"), ("gpu", "large pages")]
)
def test_the_bits_of_a_row_are_its_own(name, case_name):
    """Other pages, other slots, other neighbours and other rests change no bit."""
    case, given = CASES[case_name], inputs(CASES[case_name])
    attended = program(KERNELS[name], case)
    out, lse = attended(given, table(case))
    order = np.array([2, 3, 0, 1])
    moved = Inputs(*(x[order] for x in given))
    out_moved, lse_moved = attended(moved, table(case, seed=1), rest=7.0)
    assert np.array_equal(out[order], out_moved) and np.array_equal(lse[order], lse_moved)
    others, is_kept = inputs(case, seed=5), np.arange(len(LENGTHS)) == 3
    others.position_BT[:] = [[t + 100] for t in range(len(LENGTHS))] - np.arange(case.T)[::-1]
    mixed = Inputs(
        *(
            np.where(is_kept.reshape(-1, *(1,) * (x.ndim - 1)), x, y)
            for x, y in zip(given, others, strict=True)
        )
    )
    out_mixed, lse_mixed = attended(mixed, table(case, seed=2))
    assert np.array_equal(out[3], out_mixed[3]) and np.array_equal(lse[3], lse_mixed[3])
    assert np.isfinite(out_mixed.astype(np.float32)).all()


CALL = AttentionCall(
    num_queries=1,
    key_dim=128,
    value_dim=128,
    dtype=jnp.dtype(ml_dtypes.bfloat16),
    windows=frozenset([None, 100, Chunk(64)]),
    scores=Scores(cap=30.0),
    has_sinks=True,
    page=128,
    table=MAX_TABLE,
    group=8,
    device="h200",
)
REFUSED = {
    "tpu": [
        ({"page": None}, "a cache in pages"),
        ({"num_queries": 9}, "at most 8 queries a row, got 9"),
        ({"windows": frozenset([BothSides()])}, "both directions"),
        ({"key_dim": 192}, "multiple of 128 features, got 192 for keys and 128 for values"),
        ({"dtype": jnp.dtype("float16")}, "got float16"),
        ({"page": 8}, "pages of 16 entries or more, got 8"),
        ({"table": MAX_TABLE + 1}, "at most 131072 pages.*, got 131073: larger pages"),
        ({"has_codes": True, "has_rotated_codes": True}, "int8 or float8_e4m3fn"),
        ({"has_codes": True, "key_dim": 256, "value_dim": 256}, "heads of 128 features, got 256"),
        ({"has_codes": True, "page": 64}, "in pages of 128 entries, got 64"),
    ],
    "gpu": [
        ({"page": None}, "a cache in pages"),
        ({"device": "a100"}, "the Hopper generation, got a100"),
        ({"device": None}, "the Hopper generation, got others"),
        ({"page": 32}, "pages of 64 or 128 entries, got 32"),
        ({"dtype": jnp.dtype("float32")}, "bfloat16 and float16, got float32"),
        ({"has_codes": True}, "no cache in codes"),
        ({"reads_latents": True}, "no latents"),
        ({"windows": frozenset([BothSides()])}, "both directions"),
        ({"key_dim": 96}, "got 96 for keys and 128 for values"),
        ({"key_dim": 256, "value_dim": 256}, "set buckets.page to 64"),
        ({"num_queries": 8, "group": 9}, "at most 64 queries .*, got 8 of each of 9 heads"),
    ],
}
REFUSALS = {"tpu": paged_tpu_refusal, "gpu": paged_gpu_refusal}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_a_kernel_cannot_serve_are_refused_with_the_numbers(name):
    assert REFUSALS[name](CALL) is None
    for changed, message in REFUSED[name]:
        reason = REFUSALS[name](replace(CALL, **changed))
        assert reason is not None and re.search(message, reason), (changed, reason)
