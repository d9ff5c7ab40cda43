"""A model of five layers of different sizes: one without attention, one without feed-forward."""

import math

import numpy as np

from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.layer_config import Attention, Layer, Mlp
from noria.modelzoo.rope_config import NoRope, RopeConfig

WINDOW = 5
UNLIKE = DecoderConfig(
    vocab_size=151,
    embed=32,
    max_position=64,
    layers=(
        Layer(Attention(8, 2, 8), Mlp(48)),
        Layer(Attention(8, 1, 12, WINDOW, RopeConfig(1e5), has_sinks=True), None),
        Layer(None, Mlp(40, "gelu_tanh")),
        Layer(Attention(8, 4, 6, rope=NoRope(), qk_norm="head"), Mlp(64, is_gated=False)),
        Layer(Attention(16, 8, 4, qkv_bias=True), Mlp(24, has_bias=True)),
    ),
)


def reference_logits(parameters: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Return the logits of all tokens of a prompt, in plain numpy and float64."""
    x_TD = parameters["embedding.table"][tokens].astype(np.float64)
    for i, layer in enumerate(UNLIKE.layers):
        own = {
            name.removeprefix(prefix): value.astype(np.float64)
            for name, value in parameters.items()
            if name.startswith(prefix := f"layers.{i}.")
        }
        if layer.attention is not None:
            x_TD = x_TD + _attention(_norm(x_TD, own["attention_norm.scale"]), own, layer.attention)
        if layer.feed_forward is not None:
            x_TD = x_TD + _mlp(_norm(x_TD, own["mlp_norm.scale"]), own, layer.feed_forward)
    return _norm(x_TD, parameters["final_norm.scale"]) @ parameters["head.table"].T


def _norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + UNLIKE.norm_epsilon) * scale


def _attention(x_TD: np.ndarray, own: dict[str, np.ndarray], options: Attention) -> np.ndarray:
    T, G = len(x_TD), options.heads_per_kv
    qkv_TKJH = np.einsum("td,dkjh->tkjh", x_TD, own["attention.qkv"])
    if options.qkv_bias:
        qkv_TKJH = qkv_TKJH + own["attention.qkv_bias"]
    q_TKGH, k_TKH, v_TKH = qkv_TKJH[:, :, :G], qkv_TKJH[:, :, G], qkv_TKJH[:, :, G + 1]
    if options.qk_norm:
        q_TKGH = _norm(q_TKGH, own["attention.query_norm.scale"])
        k_TKH = _norm(k_TKH, own["attention.key_norm.scale"])
    if isinstance(options.rope, RopeConfig):
        q_TKGH, k_TKH = _rotate(q_TKGH, options.rope), _rotate(k_TKH, options.rope)
    scores_KGTS = np.einsum("tkgh,skh->kgts", q_TKGH, k_TKH) / math.sqrt(options.head_dim)
    distance_TS = np.arange(T)[:, None] - np.arange(T)[None]
    is_seen_TS = (distance_TS >= 0) & (distance_TS < (options.window or T))
    weights_KGTS = np.exp(np.where(is_seen_TS, scores_KGTS, -np.inf))
    sums_KGT = weights_KGTS.sum(-1)
    if options.has_sinks:
        sums_KGT = sums_KGT + np.exp(own["attention.sinks"])[..., None]
    weights_KGTS = weights_KGTS / sums_KGT[..., None]
    out_TKGH = np.einsum("kgts,skh->tkgh", weights_KGTS, v_TKH)
    return np.einsum("tkgh,kghd->td", out_TKGH, own["attention.output"])


def _rotate(x: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Rotate heads along the last axis; the first axis is positions."""
    half = x.shape[-1] // 2
    frequency_h = rope.theta ** (-np.arange(half) / half)
    angle = np.arange(len(x))[(slice(None), *[None] * (x.ndim - 1))] * frequency_h
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def _mlp(x_TD: np.ndarray, own: dict[str, np.ndarray], options: Mlp) -> np.ndarray:
    def activated(x: np.ndarray) -> np.ndarray:
        if options.activation == "silu":
            return x / (1 + np.exp(-x))
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    if not options.is_gated:
        return activated(x_TD @ own["mlp.up"]) @ own["mlp.down"]
    h_PTF = np.einsum("td,pdf->ptf", x_TD, own["mlp.gate_up"])
    if options.has_bias:
        h_PTF = h_PTF + own["mlp.gate_up_bias"][:, None]
    out_TD = (activated(h_PTF[0]) * h_PTF[1]) @ own["mlp.down"]
    return out_TD + own["mlp.down_bias"] if options.has_bias else out_TD
