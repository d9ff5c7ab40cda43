"""Attention kernels of whole prompts: equality with the reference, refusals, and choice."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_kernels import NEEDS_NUMBA, loaded
from jax.experimental.pallas import tpu as pltpu
from tolerances import FLOAT32_ELEMENTWISE

from noria.compile.attention_kernels import KERNELS, PAGE_KERNELS, Kernel, choose
from noria.modelzoo.attention.attend import Visibility, attend_dense, with_sinks
from noria.modelzoo.cache.stripes import EMPTY_POSITION
from noria.modelzoo.kernels.call import AttentionCall
from noria.modelzoo.kernels.cudnn import attend_cudnn
from noria.modelzoo.kernels.splash import attend_splash
from noria.modelzoo.layer_config import PLAIN_SCORES, Chunk, Scores

T, TRUE_LENGTHS = 384, (384, 130)
"""A prompt's length of three blocks, and the true lengths of two rows."""
PLAIN = AttentionCall(
    num_queries=T,
    key_dim=16,
    value_dim=16,
    dtype=jnp.dtype(jnp.bfloat16),
    windows=frozenset([None]),
    scores=PLAIN_SCORES,
    has_sinks=False,
    is_in_order=True,
)
CALLS = {
    "causal": PLAIN,
    "windows, scaled": replace(PLAIN, windows=frozenset([100]), scores=Scores(scale=0.9)),
    "chunks": replace(PLAIN, windows=frozenset([Chunk(96)])),
    "capped": replace(PLAIN, scores=Scores(cap=0.7)),
    "sinks": replace(PLAIN, has_sinks=True),
    "values of their own size": replace(PLAIN, key_dim=24, value_dim=16),
    "one position": replace(PLAIN, windows=frozenset([1])),
    "windows of all": replace(PLAIN, windows=frozenset([T + 44])),
}
OFTEN = {"windows, scaled", "values of their own size"}
"""Cases of every run. The others are slow; tests of models also cover the features of models."""
SERVED = {
    "splash": {*CALLS},
    "cudnn": {"causal", "windows, scaled", "one position", "windows of all"},
    "numba": {*CALLS} - {"values of their own size"},
    "xla": {*CALLS},
}


def here(kernel: Kernel, call: AttentionCall):
    """Return the kernel in a form for the CPU; for cuDNN, the function's other implementation."""
    return cudnn_by_xla if kernel.name == "cudnn" else kernel.attend([call])


def cudnn_by_xla(*arguments):
    def attend(*operands, implementation: str, **options):
        return attend_by_jax(*operands, implementation="xla", **options)

    attend_by_jax = jax.nn.dot_product_attention
    with patch.object(jax.nn, "dot_product_attention", attend):
        return attend_cudnn(*arguments)


def inputs(call: AttentionCall, dtype):
    rng = np.random.default_rng(0)
    B, K, G = len(TRUE_LENGTHS), 2, 2
    H, value_dim = call.key_dim, call.value_dim
    shapes = ((B, T, K, G, H), (B, K, H, T), (B, K, T, value_dim), (K, G))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def prompts(call: AttentionCall) -> Visibility:
    (window,) = call.windows
    position_BT = np.broadcast_to(np.arange(T), (len(TRUE_LENGTHS), T))
    is_token_BT = position_BT < np.array(TRUE_LENGTHS)[:, None]
    key_position_BT = np.where(is_token_BT, position_BT, EMPTY_POSITION)
    return Visibility(jnp.asarray(position_BT), jnp.asarray(key_position_BT), window, True)


def attended(attend, call: AttentionCall, dtype=jnp.float32, exact: bool = False):
    """Return `out` (with the call's sinks, if any) and `lse`, for tokens without padding.

    `exact` computes with numbers of `dtype` in float32.
    """

    def run(q_BTKGH, k_BKHS, v_BKSH, sink_KG):
        out, lse = attend(q_BTKGH, k_BKHS, v_BKSH, prompts(call), call.scores)
        return with_sinks(out, lse, sink_KG if call.has_sinks else None), lse

    arrays = [x.astype(jnp.float32) if exact else x for x in inputs(call, dtype)]
    with pltpu.force_tpu_interpret_mode():
        result = jax.jit(run)(*arrays)
    is_token_BT = np.asarray(prompts(call).key_position_BS) != EMPTY_POSITION
    return [np.asarray(x, np.float32)[is_token_BT] for x in result]


@cache
def expected_of(case: str):
    return attended(attend_dense, CALLS[case])


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in OFTEN else [pytest.mark.slow]) for case in CALLS],
)
@pytest.mark.parametrize(
    "kernel",
    [pytest.param(x, id=x.name, marks=list(NEEDS_NUMBA) * (x.name == "numba")) for x in KERNELS],
)
def test_a_kernel_equals_the_reference_or_refuses(kernel, case):
    """Numbers are float32; a kernel for narrower numbers runs in its other implementation."""
    call = CALLS[case]
    with loaded() if kernel.name == "numba" else nullcontext():
        refusal = kernel.refusal(call)
    assert (refusal is None) == (case in SERVED[kernel.name])
    if refusal is not None:
        return
    out, lse = attended(here(kernel, call), call)
    expected_out, expected_lse = expected_of(case)
    np.testing.assert_allclose(out, expected_out, rtol=0, atol=FLOAT32_ELEMENTWISE)
    if call.has_sinks:
        np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=FLOAT32_ELEMENTWISE)
    elif kernel.name == "splash":
        assert np.isnan(lse).all(), "what is not asked for cannot be used by mistake"


def test_splash_keeps_sums_of_half_precision_in_float32():
    exact, _ = attended(attend_dense, PLAIN, jnp.bfloat16, exact=True)
    dense, _ = attended(attend_dense, PLAIN, jnp.bfloat16)
    out, _ = attended(attend_splash, PLAIN, jnp.bfloat16)
    error, of_dense = (np.abs(x - exact).mean() for x in (out, dense))
    assert 0 < error < 1.1 * of_dense


@pytest.mark.parametrize(
    ("kernel", "change", "reason"),
    [
        ("splash", {"num_queries": 200}, "whole blocks of 128 tokens, got 200"),
        ("splash", {"num_queries": 257 * 128}, "ends at 32768 tokens, got 32896"),
        ("splash", {"is_in_order": False}, "whole prompts whose tokens lie in order"),
        ("cudnn", {"is_in_order": False}, "whole prompts whose tokens lie in order"),
        ("cudnn", {"dtype": jnp.dtype(jnp.float32)}, "takes bfloat16 and float16, got float32"),
        ("cudnn", {"value_dim": 8}, "values and keys of one head size, got 8 and 16"),
        ("cudnn", {"key_dim": 12, "value_dim": 12}, "multiples of 8 to 128, got 12"),
        ("cudnn", {"key_dim": 256, "value_dim": 256}, "multiples of 8 to 128, got 256"),
        ("cudnn", {"scores": Scores(cap=1.0)}, "does not cap"),
        ("cudnn", {"has_sinks": True}, "too coarse to weigh sinks"),
        ("cudnn", {"windows": frozenset([None, Chunk(4)])}, "no mask of chunks"),
    ],
)
def test_what_a_kernel_cannot_serve_is_refused_with_a_reason(kernel, change, reason):
    (found,) = (one for one in KERNELS if one.name == kernel)
    assert found.refusal(PLAIN) is None
    assert reason in (found.refusal(replace(PLAIN, **change)) or "")


def test_a_graph_that_needs_a_library_which_is_not_here_says_what_to_install(monkeypatch):
    def without_cudnn(*arguments, **options):
        raise RuntimeError("cuDNN is not detected.")

    monkeypatch.setattr(jax.nn, "dot_product_attention", without_cudnn)
    message = r"expected cuDNN's library.* not detected\. Install .*gpu-compile.* the kernel xla"
    with pytest.raises(ValueError, match=message):
        attended(attend_cudnn, PLAIN, jnp.bfloat16)


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("cpu", "xla (numba: the kernels for the CPU are not loaded (extra noria[cpu]))"),
        ("tpu", "splash (tpu, bfloat16, heads of 16, causal)"),
        ("gpu", "cudnn (gpu, bfloat16, heads of 16, causal)"),
    ],
)
def test_a_platform_has_its_kernel_chosen(platform, expected):
    assert str(choose([PLAIN], platform, "prefill")) == expected


def test_the_reason_for_another_kernel_is_what_was_refused():
    choice = choose([replace(PLAIN, num_queries=200)], "tpu", "prefill")
    assert choice.kernel == "xla"
    assert choice.reason == "splash: it takes whole blocks of 128 tokens, got 200 tokens"


def test_a_kernel_that_is_asked_for_is_never_replaced():
    assert str(choose([PLAIN], "tpu", "prefill", "xla")) == "xla (as the plan asks)"
    in_float32 = replace(PLAIN, dtype=jnp.dtype(jnp.float32))
    for call, platform, phase, asked, kernels, reason in (
        (PLAIN, "cpu", "prefill", "splash", KERNELS, "it is for tpu, not for cpu"),
        (PLAIN, "tpu", "decode", "splash", PAGE_KERNELS, "it does not read pages"),
        (PLAIN, "tpu", "prefill", "paged", KERNELS, "it only reads pages"),
        (in_float32, "gpu", "prefill", "cudnn", KERNELS, "it takes bfloat16 and float16"),
    ):
        with pytest.raises(ValueError, match=rf"\[attention\] {phase}: .* '{asked}': {reason}"):
            choose([call], platform, phase, asked, kernels)


def test_a_kernel_must_serve_every_kind_of_layer():
    """Layers with several head sizes have one kernel, which the last of them may refuse."""
    narrow = replace(PLAIN, key_dim=PLAIN.key_dim + 3, value_dim=PLAIN.key_dim + 3)
    alone, refused = choose([PLAIN], "gpu", "prefill"), choose([narrow], "gpu", "prefill")
    assert (alone.kernel, refused.kernel) == ("cudnn", "xla")
    assert choose([PLAIN, narrow], "gpu", "prefill").kernel == "xla"
    with pytest.raises(ValueError, match="expected a kernel that can serve it, got 'cudnn'"):
        choose([PLAIN, narrow], "gpu", "prefill", "cudnn")
