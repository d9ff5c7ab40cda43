"""The kernel for the CPU against plain numpy: drawn shapes, guarded buffers, errors, processors."""

import resource
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_kernels import NEEDS_NUMBA, loaded
from guarded_frame import call, guarded
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import FLOAT32_ELEMENTWISE

from noria.modelzoo.attention.attend import Visibility, attend_dense
from noria.modelzoo.cache.stripes import EMPTY_POSITION
from noria.modelzoo.cpu import ENTRIES, attend_name, objects
from noria.modelzoo.kernels.call import AttentionCall
from noria.modelzoo.kernels.cpu_attention import attend_prompts_cpu, cpu_refusal
from noria.modelzoo.layer_config import PLAIN_SCORES, BothSides, Scores

pytestmark = list(NEEDS_NUMBA)


@pytest.fixture(autouse=True)
def _kernels():
    with loaded():
        yield


def handler(dtype: str = "float32") -> int:
    (engine,) = objects._engines
    return engine.get_function_address(attend_name(dtype))


@st.composite
def calls(draw: st.DrawFn) -> list[np.ndarray]:
    """Draw the arguments of a call; entries that no query may use are NaN."""
    B, K, N = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 8))
    T, G = draw(st.sampled_from([1, 2, 7, 16, 33])), draw(st.integers(1, 16))
    H, V = (16 * draw(st.integers(1, 16)) for _ in range(2))
    S = 16 * draw(st.integers(1, 32))
    rng = np.random.default_rng(draw(st.integers(0, 2**31)))
    P, cap, dtype = B * N + 1, draw(st.sampled_from([0.0, 3.0])), draw(st.sampled_from(ENTRIES))
    low = rng.integers(0, N * S + 1, (B, T))
    high = np.minimum(low + rng.integers(0, N * S + 1, (B, T)), N * S)
    q, k, v = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((B, T, K, G, H), (P, K, S, H), (P, K, S, V))
    )
    page = rng.permutation(P)[: B * N].reshape(B, N)
    entry = np.arange(N * S).reshape(N, S)
    for b in range(B):
        is_used = high[b] > low[b]
        first, last = (low[b][is_used].min(), high[b][is_used].max()) if is_used.any() else (0, 0)
        is_free = (entry < first) | (entry >= last)
        for n in range(N):
            for x in (k, v):
                x[page[b, n]][:, is_free[n]] = np.nan
    if dtype == "bfloat16":
        q = q.astype(jnp.dtype(dtype)).astype(np.float32)
    factors = np.array([H**-0.5, cap], np.float32)
    integers = page.astype(np.int32), np.stack([low, high]).astype(np.int32)
    if dtype == "int8":
        scales = [np.abs(x).max(axis=-1) / 127 for x in (k, v)]
        codes = [x / scale[..., None] for x, scale in zip((k, v), scales, strict=True)]
        # NaN is in the scales alone
        k, v = (np.nan_to_num(np.rint(x)).astype(np.int8) for x in codes)
        return [q, k, v, *integers, factors, *scales]
    k, v = (x.astype(jnp.dtype(dtype)) for x in (k, v))
    return [q, k, v, *integers, factors]


def expected(arguments: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    q, k, v, page, (low, high), (factor, cap), *scales = arguments
    if scales:
        k, v = (x * scale[..., None] for x, scale in zip((k, v), scales, strict=True))
    B, T, K, G, _ = q.shape
    out, lse = np.zeros((B, T, K, G, v.shape[-1])), np.full((B, T, K, G), -np.inf)
    for b, t, kv in np.ndindex(B, T, K):
        seen = slice(low[b, t], high[b, t])
        keys, values = (
            x[page[b], kv].reshape(-1, x.shape[-1])[seen].astype(np.float64) for x in (k, v)
        )
        if not len(keys):
            continue
        scores = q[b, t, kv].astype(np.float64) @ keys.T * factor
        if cap:
            scores = cap * np.tanh(scores / cap)
        largest = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - largest)
        lse[b, t, kv] = largest[:, 0] + np.log(weights.sum(axis=1))
        out[b, t, kv] = weights @ values / weights.sum(axis=1, keepdims=True)
    return out, lse


@settings(max_examples=60, deadline=None)
@given(calls(), st.booleans())
def test_it_equals_the_reference_and_touches_its_buffers_alone(arguments, at_end):
    wanted = expected(arguments)
    given_buffers = [guarded(x, at_end=at_end) for x in arguments]
    made = [guarded(np.full(x.shape, 9, np.float32), at_end=at_end) for x in wanted]
    address = handler(arguments[1].dtype.name)
    failed = call(address, [x.array for x in given_buffers], [x.array for x in made])
    assert failed is None
    for found, value in zip(made, wanted, strict=True):
        np.testing.assert_allclose(found.array, value, atol=FLOAT32_ELEMENTWISE, rtol=1e-5)
    for before, after in zip(arguments, given_buffers, strict=True):
        assert before.tobytes() == after.array.tobytes()


def arguments_of_one_row() -> list[np.ndarray]:
    q, k = np.ones((1, 1, 1, 1, 16), np.float32), np.ones((2, 1, 16, 16), np.float32)
    seen = np.array([[[0]], [[3]]], np.int32)
    return [q, k, k, np.array([[1]], np.int32), seen, np.array([1, 0], np.float32)]


@pytest.mark.parametrize(
    ("index", "other", "message"),
    [
        (0, np.ones((1, 1, 1, 1, 32), np.float32), "sizes or rows of its arguments"),
        (2, np.ones((1, 1, 16, 16), np.float32), "sizes or rows of its arguments"),
        (1, np.ones((2, 1, 17, 16), np.float32), "sizes or rows of its arguments"),
        (3, np.zeros((2, 1), np.int32), "sizes or rows of its arguments"),
        (4, np.zeros((2, 1, 2), np.int32), "sizes or rows of its arguments"),
        (3, np.zeros((1, 1), np.float32), "expected arguments float32 of rank 5"),
        (0, np.ones((1, 1, 1, 16), np.float32), "expected arguments float32 of rank 5"),
    ],
)
def test_arguments_that_do_not_fit_are_an_error(index, other, message):
    arguments = arguments_of_one_row()
    results = [np.zeros((1, 1, 1, 1, 16), np.float32), np.zeros((1, 1, 1, 1), np.float32)]
    assert call(handler(), arguments, results) is None
    arguments[index] = other
    failed = call(handler(), arguments, results)
    assert failed is not None and message in failed
    assert "expected arguments" in (call(handler(), arguments[:-1], results) or "")


def test_an_error_reaches_the_caller_of_jax():
    arguments = arguments_of_one_row()
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 1, 1, 1, 32), (1, 1, 1, 1))]
    with pytest.raises(jax.errors.JaxRuntimeError, match="do not belong together"):
        jax.block_until_ready(jax.ffi.ffi_call(attend_name("float32"), shapes)(*arguments))


def test_a_lack_of_memory_is_an_error():
    """A block of many heads needs 64 MB, which the process may not have."""
    arguments = arguments_of_one_row()
    arguments[0] = np.ones((1, 1, 1, 1 << 14, 1 << 10), np.float32)
    arguments[1] = arguments[2] = np.ones((2, 1, 16, 1 << 10), np.float32)
    results = [np.zeros_like(arguments[0]), np.zeros((1, 1, 1, 1 << 14), np.float32)]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), hard))
    try:
        failed = call(handler(), arguments, results)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert failed == "noria: no memory for a call"
    assert call(handler(), arguments, results) is None


def test_numbers_that_are_not_finite_reach_the_result():
    for number in (np.nan, np.inf):
        arguments = arguments_of_one_row()
        arguments[1] = arguments[1].copy()
        arguments[1][1, 0, 2, 5] = number
        results = [np.zeros((1, 1, 1, 1, 16), np.float32), np.zeros((1, 1, 1, 1), np.float32)]
        assert call(handler(), arguments, results) is None
        assert not np.isfinite(results[0]).any()


@pytest.mark.parametrize(
    ("window", "scores", "T", "H"),
    [
        (None, PLAIN_SCORES, 112, 64),
        (20, Scores(cap=3.0), 112, 64),
        (BothSides(5), PLAIN_SCORES, 101, 32),
        (BothSides(None), PLAIN_SCORES, 101, 48),
        (None, PLAIN_SCORES, 7, 112),
    ],
)
def test_whole_prompts_attend_as_in_the_reference(window, scores, T, H):
    B, K, G = 3, 2, 3
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (B, T, K, G, H), (B, K, H, T), (B, K, T, H)
    q, k, v = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    index_1T, count_B1 = jnp.arange(T)[None], jnp.array([T, T // 2, 1])[:, None]
    position_BT = jnp.where(index_1T < count_B1, index_1T, EMPTY_POSITION)
    visibility = Visibility(position_BT, position_BT, window, is_in_order=True)
    found = attend_prompts_cpu(q, k, v, visibility, scores)
    is_token = np.asarray(position_BT != EMPTY_POSITION)
    for x, wanted in zip(found, attend_dense(q, k, v, visibility, scores), strict=True):
        x, wanted = np.asarray(x)[is_token], np.asarray(wanted)[is_token]
        np.testing.assert_allclose(x, wanted, atol=FLOAT32_ELEMENTWISE)


def test_the_form_for_other_processors_is_right():
    """Vectors of eight numbers, compiled for a processor with AVX2 alone."""
    program = """
import jax, numpy as np
from noria.modelzoo.cpu import objects
objects.Processor.here = classmethod(lambda cls: cls("haswell", "+avx2,+fma"))
objects.register(objects.compile_all(objects.Processor.here()))
rng = np.random.default_rng(0)
shapes = (2, 5, 2, 3, 48), (3, 2, 48, 48), (3, 2, 48, 48)
q, k, v = (rng.standard_normal(shape).astype("float32") for shape in shapes)
page, low = np.array([[0], [2]], "int32"), np.zeros((2, 5), "int32")
high = np.arange(30, 40, dtype="int32").reshape(2, 5)
seen = np.stack([low, high])
shapes = [jax.ShapeDtypeStruct(s, "float32") for s in (q.shape, q.shape[:-1])]
attend = jax.ffi.ffi_call("noria_attend_pages_float32", shapes)
out, lse = attend(q, k, v, page, seen, np.array([1, 0], "float32"))
for b, t in np.ndindex(2, 5):
    keys, values = (x[page[b, 0], :, : high[b, t]] for x in (k, v))
    scores = np.einsum("kgh,ksh->kgs", q[b, t], keys)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    wanted = np.einsum("kgs,ksh->kgh", weights, values) / weights.sum(-1)[..., None]
    assert np.abs(wanted - np.asarray(out)[b, t]).max() < 1e-5
print("right")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"key_dim": 40}, "multiple of 16 features, got 40"),
        ({"page": 24}, r"pages of a multiple of 16 entries, got 24 \(buckets.page\)"),
        ({"page": None}, "tokens lie in order on one device"),
        ({"codes": "int4"}, "codes in int8 alone, got int4"),
        ({"codes": "int8", "splits": (32,)}, "no latents in codes"),
        (
            {"codes": "int8", "key_dim": 256},
            "at most 128 features, or of no multiple of 128, got 256",
        ),
        ({"stripes": 2}, "2 devices"),
    ],
)
def test_it_says_what_it_does_not_serve(facts, reason):
    plain = {"num_queries": 1, "key_dim": 64, "value_dim": 64, "dtype": jnp.dtype("float32")}
    plain |= {"windows": frozenset({None}), "scores": PLAIN_SCORES, "has_sinks": False, "page": 64}
    assert cpu_refusal(AttentionCall(**plain)) is None
    refusal = cpu_refusal(AttentionCall(**plain | facts))
    assert refusal is not None
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(refusal)
