"""Kernels that read live pages, and their portable form, against a plain reference in numpy.

The rows of a call are single tokens or tiles of prompts: in the middle of a prompt, several of one
prompt, short last ones and rows without tokens.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from coded_entries import decode, encode, in_blocks, pair
from cpu_kernels import NEEDS_NUMBA, loaded
from jax.experimental.pallas import tpu as pltpu
from mosaic_interpreter import interpreted_on_cpu
from tolerances import BFLOAT16_ELEMENTWISE, BFLOAT16_ELEMENTWISE_RELATIVE, FLOAT32_ELEMENTWISE

from noria.modelzoo.attention.attend import merge
from noria.modelzoo.attention.paged import PagedRows, attend_in_groups
from noria.modelzoo.cache.entry_codes import EntryCodes
from noria.modelzoo.kernels import paged_tpu
from noria.modelzoo.kernels.call import AttentionCall
from noria.modelzoo.kernels.cpu_attention import attend_pages_cpu
from noria.modelzoo.kernels.paged_gpu import attend_pages_gpu, paged_gpu_refusal
from noria.modelzoo.kernels.paged_rows import QueryBlocks
from noria.modelzoo.kernels.paged_tpu import MAX_TABLE, attend_pages_tpu, paged_tpu_refusal
from noria.modelzoo.layer_config import PLAIN_SCORES, BothSides, Chunk, Scores, Window

PAGE = 64
NUM_POOL = 24
"""Pages of the pool, more than the rows use."""
EMPTY = 1
"""The row without tokens."""


class Row(NamedTuple):
    """A row of a call."""

    first: int
    """The position of its first token."""
    count: int
    prompt: int


ROWS = {
    1: (Row(70, 1, 0), Row(0, 0, 1), Row(6, 1, 2), Row(133, 1, 3)),
    16: (Row(112, 16, 0), Row(0, 0, 1), Row(128, 3, 0), Row(16, 5, 2)),
    64: (Row(64, 64, 0), Row(0, 0, 1), Row(0, 30, 0), Row(128, 7, 2)),
}
"""The rows of a call by the tokens of a tile."""
KEPT = 2
"""A row whose neighbours change."""


class Case(NamedTuple):
    """Sizes and options of a call."""

    T: int = 16
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
    "plain": Case(T=1),
    "bfloat16": Case(dtype="bfloat16", K=2, window=20, scores=Scores(0.1, 2.0)),
    "windows": Case(T=64, window=50),
    "chunks": Case(window=Chunk(24), scores=Scores(cap=0.7)),
    "many heads": Case(K=3, G=5, H=256),
    "heads of 64": Case(dtype="bfloat16", H=64, G=8),
    "large pages": Case(dtype="float16", page=128),
    "one token in float16": Case(dtype="float16", T=1, window=50),
    "int8": Case(codes="int8", K=2, window=30),
    "float8": Case(codes="float8_e4m3fn", page=128, T=1, G=4),
    "latents": Case(is_latent=True, T=64, G=16, H=256),
    "latents in codes": Case(is_latent=True, G=16, H=256, codes="int8", splits=(128,)),
    "int4": Case(codes="int4", K=2, T=1, window=50, scores=Scores(cap=3.0)),
    "latents in int4": Case(is_latent=True, G=4, H=512, page=128, codes="int4", splits=(256,)),
}
ON_GPU = {"bfloat16", "heads of 64", "large pages", "one token in float16"}
ON_CPU = {name for name, case in CASES.items() if case.codes is None}
ON_TPU = set(CASES) - {"heads of 64", "large pages", "one token in float16"}


@contextmanager
def in_small_blocks() -> Iterator[None]:
    """Let the kernel for TPU serve a tile in blocks of a few tokens."""
    with pytest.MonkeyPatch.context() as patch, pltpu.force_tpu_interpret_mode():
        patch.setattr(paged_tpu, "MAX_ROWS", 10)
        yield


KERNELS = {
    "portable": Kernel(
        partial(attend_in_groups, group=2),
        set(CASES),
        # it multiplies entries of a row's last page by zero, so a pool is cleared of NaN
        rest=5.0,
    ),
    "tpu": Kernel(attend_pages_tpu, ON_TPU, pltpu.force_tpu_interpret_mode),
    "tpu, small blocks": Kernel(attend_pages_tpu, {"chunks", "many heads"}, in_small_blocks),
    "gpu": Kernel(attend_pages_gpu, ON_GPU, interpreted_on_cpu),
    "cpu": Kernel(attend_pages_cpu, ON_CPU, loaded),
}
OFTEN = {("tpu", "windows"), ("portable", "bfloat16"), ("tpu, small blocks", "chunks")}
"""Pairs of every run: interpreters are slow. The test of bits runs both kernels."""


class Inputs(NamedTuple):
    """Queries and entries of rows, `k_BKSH` and `v_BKSH` at the positions of their last axis."""

    q_BTKGH: np.ndarray
    k_BKSH: np.ndarray
    v_BKSH: np.ndarray
    first_B: np.ndarray
    count_B: np.ndarray


def marks(name: str, case: str) -> list[pytest.MarkDecorator]:
    """The marks of a case of a kernel."""
    if name == "cpu":
        return list(NEEDS_NUMBA)
    return [] if (name, case) in OFTEN else [pytest.mark.slow]


def inputs(case: Case, seed: int = 0) -> Inputs:
    rng, rows = np.random.default_rng(seed), ROWS[case.T]
    first_B, count_B, prompt_B = np.array(rows).T
    S = table(case).shape[1] * case.page
    q = rng.normal(size=(len(rows), case.T, case.K, case.G, case.H))
    k, v = rng.normal(size=(2, len(rows), case.K, S, case.H))[:, prompt_B]
    dtype = np.dtype(case.dtype)
    q, k, v = (x.astype(dtype) for x in (q, k, k if case.is_latent else v))
    return Inputs(q, k, v, first_B, count_B)


def table(case: Case, seed: int = 0, *, is_shared: bool = True) -> np.ndarray:
    """Return the pages of each row; those of one prompt have the same pages if it is shared."""
    rows = ROWS[case.T]
    shape = len(rows), -(-max(row.first + case.T for row in rows) // case.page)
    page_BN = np.random.default_rng(seed).permutation(NUM_POOL)[: np.prod(shape)].reshape(shape)
    return page_BN[[row.prompt for row in rows]] if is_shared else page_BN


def seen_of_pages(given: Inputs, case: Case, page_BN: np.ndarray) -> np.ndarray:
    """Return which entries lie in pages that a row must read, and are not after its last token."""
    position_S = np.arange(given.k_BKSH.shape[2])
    is_seen_BS = np.array(
        [
            (position_S >= first_seen(first, case.window) // case.page * case.page)
            & (position_S < first + count)
            for first, count in zip(given.first_B, given.count_B, strict=True)
        ]
    )
    shares_BB = page_BN[:, :1] == page_BN[:, 0]
    return (shares_BB[..., None] & is_seen_BS).any(axis=1)


def in_pages(
    x_BKSH: np.ndarray, page_BN: np.ndarray, is_seen_BS: np.ndarray, rest: Any
) -> np.ndarray:
    """Return a pool in which entries that no row may use are `rest`."""
    B, K, S, *features = x_BKSH.shape
    shown = is_seen_BS.reshape(B, 1, S, *(1 for _ in features))
    x_BKSH = np.where(shown, x_BKSH, np.asarray(rest, x_BKSH.dtype))
    N = page_BN.shape[1]
    pool = np.full((NUM_POOL, K, S // N, *features), rest, x_BKSH.dtype)
    pool[page_BN] = x_BKSH.reshape(B, K, N, S // N, *features).swapaxes(1, 2)
    return pool


def pools_of(
    given: Inputs, case: Case, page_BN: np.ndarray, is_seen_BS: np.ndarray, rest: float
) -> list[Any]:
    """Return the pages of keys and of values; `rest` is what free entries hold."""
    both = given.k_BKSH, given.v_BKSH
    if case.codes is None:
        return [jnp.asarray(in_pages(x, page_BN, is_seen_BS, rest)) for x in both]
    encoded = [encode(x, 3, case.codes, np.dtype("float32"), case.splits) for x in both]
    codes, halves = [codes for codes, _ in encoded], ((), ())
    if case.codes == "int4":
        lower, upper = np.split(codes[0], 2, axis=-1) if case.is_latent else codes
        codes = [pair(lower, upper)] * 2
        halves = ((0, 1), (0, 1)) if case.is_latent else ((0,), (1,))
    scales = [
        in_pages(np.stack(scales, axis=3), page_BN, is_seen_BS, rest).swapaxes(2, 3)
        for _, scales in encoded
    ]
    return [
        EntryCodes(
            jnp.asarray(in_blocks(in_pages(codes, page_BN, is_seen_BS, 3))),
            jnp.asarray(scale_PKRS),
            case.splits,
            halves,
        )
        for codes, scale_PKRS, halves in zip(codes, scales, halves, strict=True)
    ]


def program(kernel: Kernel, case: Case) -> Any:
    """Return the compiled kernel, as a function of inputs, pages and what free entries hold."""

    @jax.jit
    def run(q_BTKGH: Any, k_PKSH: Any, v_PKSH: Any, rows: PagedRows) -> Any:
        if case.is_latent:
            v_PKSH = k_PKSH
        elif case.codes == "int4":
            v_PKSH = replace(v_PKSH, codes=k_PKSH.codes)
        return kernel.attend(q_BTKGH, k_PKSH, v_PKSH, rows, case.window, case.scores)

    def attended(
        given: Inputs, page_BN: np.ndarray, rest: float = kernel.rest, **limits: Any
    ) -> list[np.ndarray]:
        is_seen_BS = seen_of_pages(given, case, page_BN)
        k, v = pools_of(given, case, page_BN, is_seen_BS, rest)
        rows = page_BN, given.first_B, given.count_B
        rows = PagedRows(*(jnp.asarray(x, jnp.int32) for x in rows))._replace(**limits)
        with kernel.context():
            found = run(jnp.asarray(given.q_BTKGH), k, v, rows)
        return [np.asarray(x) for x in found]

    return attended


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
    for b, t in np.ndindex(*given.q_BTKGH.shape[:2]):
        if t >= given.count_B[b]:
            continue
        position = int(given.first_B[b]) + t
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
        pytest.param(name, case, marks=marks(name, case))
        for name, kernel in KERNELS.items()
        for case in CASES
        if case in kernel.serves
    ],
)
def test_it_equals_the_reference(name, case_name):
    """Entries after a tile and pages before its window are not used, and neither are free pages."""
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
    ("name", "case_name"),
    [
        ("portable", "chunks"),
        ("tpu", "many heads"),
        ("gpu", "large pages"),
        pytest.param("cpu", "many heads", marks=NEEDS_NUMBA),
    ],
)
def test_the_bits_of_a_row_are_its_own(name, case_name):
    """Other pages, other places, other neighbours and other rests change no bit."""
    case, given = CASES[case_name], inputs(CASES[case_name])
    attended = program(KERNELS[name], case)
    out, lse = attended(given, table(case))
    order = np.roll(np.arange(len(out)), 2)
    moved = Inputs(*(x[order] for x in given))
    out_moved, lse_moved = attended(moved, table(case, seed=1)[order], rest=7.0)
    assert np.array_equal(out[order], out_moved) and np.array_equal(lse[order], lse_moved)
    others, is_kept = inputs(case, seed=5), np.arange(len(out)) == KEPT
    others.first_B[:] = 16 * np.arange(len(out))
    others.count_B[:] = case.T
    mixed = Inputs(
        *(
            np.where(is_kept.reshape(-1, *(1,) * (x.ndim - 1)), x, y)
            for x, y in zip(given, others, strict=True)
        )
    )
    out_mixed, lse_mixed = attended(mixed, table(case, seed=2, is_shared=False))
    assert np.array_equal(out[KEPT], out_mixed[KEPT])
    assert np.array_equal(lse[KEPT], lse_mixed[KEPT])
    assert np.isfinite(out_mixed.astype(np.float32)).all()


@pytest.mark.parametrize(
    ("name", "case_name"),
    [
        ("portable", "plain"),
        ("tpu", "plain"),
        ("gpu", "heads of 64"),
        pytest.param("cpu", "plain", marks=NEEDS_NUMBA),
    ],
)
def test_two_reads_up_to_a_page_and_from_it_on_are_one(name, case_name):
    """Each row is cut at an end of its own: at its beginning, inside, or past its last page."""
    case, given = CASES[case_name], inputs(CASES[case_name])
    attended = program(KERNELS[name], case)
    cut_B = jnp.array([64, 64, 0, 128], jnp.int32)
    parts = [attended(given, table(case), **{limit: cut_B}) for limit in ("end_B", "begin_B")]
    assert np.isneginf(parts[0][1][2]).all()
    out, lse = merge([tuple(map(jnp.asarray, part)) for part in parts])
    wanted_out, wanted_lse = expected(given, case)
    exact = case.dtype == "float32"
    rtol = 0 if exact else BFLOAT16_ELEMENTWISE_RELATIVE
    atol = FLOAT32_ELEMENTWISE if exact else BFLOAT16_ELEMENTWISE + BFLOAT16_ELEMENTWISE_RELATIVE
    np.testing.assert_allclose(np.asarray(out, np.float64), wanted_out, rtol=rtol, atol=atol)
    np.testing.assert_allclose(np.asarray(lse), wanted_lse, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    ("window", "first_pages"), [(None, (0, 0, 0, 0)), (60, (0, 0, 1, 0)), (Chunk(64), (1, 1, 2, 0))]
)
def test_a_block_reads_from_its_window_to_its_last_token(window, first_pages):
    """Blocks of six tokens of tiles of sixteen; the last block of the first tile has two tokens."""
    blocks = QueryBlocks.of(jnp.zeros((2, 16, 1, 4, 8)), 6, 8, window)
    rows = PagedRows(jnp.zeros((2, 4), jnp.int32), jnp.array([116, 0]), jnp.array([14, 0]))
    read = blocks.read_pages(rows, 64)
    assert (blocks.per_row, blocks.num_tokens, blocks.num_rows) == (3, 6, 24)
    assert read.count_C.tolist() == [6, 6, 2, 0, 0, 0]
    assert read.first_C.tolist()[:3] == [116, 122, 128]
    assert read.first_page_C.tolist() == [*first_pages, 0, 0]
    assert read.end_page_C.tolist() == [2, 2, 3, 0, 0, 0]


CALL = AttentionCall(
    num_queries=16,
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
        ({"stripes": 2}, "entries on one device, got 2 devices"),
        ({"windows": frozenset([BothSides()])}, "both directions"),
        ({"key_dim": 192}, "multiple of 128 features, got 192 for keys and 128 for values"),
        ({"dtype": jnp.dtype("float16")}, "got float16"),
        ({"page": 8}, "pages of 16 entries or more, got 8"),
        ({"table": MAX_TABLE + 1}, "at most 131072 pages.*, got 131073: larger pages"),
        ({"codes": "int8", "splits": (192,)}, "latents of a multiple of 128 features, got 192"),
        ({"codes": "int8", "page": 64}, "in pages of 128 entries, got 64"),
    ],
    "gpu": [
        ({"page": None}, "a cache in pages"),
        ({"stripes": 2}, "entries on one device, got 2 devices"),
        ({"device": "a100"}, "the Hopper generation, got a100"),
        ({"device": None}, "the Hopper generation, got others"),
        ({"page": 32}, "pages of 64 or 128 entries, got 32"),
        ({"dtype": jnp.dtype("float32")}, "bfloat16 and float16, got float32"),
        ({"codes": "int8"}, "no cache in codes"),
        ({"splits": (512,)}, "no latents"),
        ({"windows": frozenset([BothSides()])}, "both directions"),
        ({"key_dim": 96}, "got 96 for keys and 128 for values"),
        ({"key_dim": 256, "value_dim": 256}, "set buckets.page to 64"),
        ({"group": 65}, "at most 64 query heads of a key/value head, got 65"),
    ],
}
REFUSALS = {"tpu": paged_tpu_refusal, "gpu": paged_gpu_refusal}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_a_kernel_cannot_serve_are_refused_with_the_numbers(name):
    assert REFUSALS[name](CALL) is None
    for changed, message in REFUSED[name]:
        reason = REFUSALS[name](replace(CALL, **changed))
        assert reason is not None and re.search(message, reason), (changed, reason)
