"""The decoder: one definition for every dense family, read through prefill and through decode.

A family chooses sizes and options in `DecoderConfig`; nothing here branches on a family's name.
Knows logical axes and positions; knows no mesh, bucket, file or text. `attend` and `constrain` are
injected: other attention implementations and sharding constraints must not change the answer.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import axes
from .attention import Attend, attend_dense, attend_prompt
from .config import DecoderConfig
from .kv_cache import (
    KeysValues,
    KVCache,
    PromptKeysValues,
    append,
    append_position,
    attend_cached,
)
from .layers import Embedding, GatedMlp, RMSNorm, constant, weight
from .rope import Rotation, rotate, rotation

Constrain = Callable[[jax.Array, tuple[str, ...]], jax.Array]
AttendLayer = Callable[[jax.Array, PromptKeysValues], jax.Array]
"""What a layer does with its queries and new keys and values: attend, keep what must be kept."""


def unconstrained(x: jax.Array, logical_axes: tuple[str, ...]) -> jax.Array:
    """The `constrain` of a single device."""
    del logical_axes
    return x


class Attention(nnx.Module):
    """Projections of grouped-query attention (Ainslie et al. 2023, 2305.13245), around `attend`."""

    def __init__(self, rngs: nnx.Rngs, config: DecoderConfig, window: int | None):
        D, K, G, H = config.embed, config.num_kv_heads, config.heads_per_kv, config.head_dim
        qkv_axes = (axes.KV_HEADS, axes.HEADS_PER_KV, axes.HEAD_DIM)
        self.qkv = weight(rngs, (D, K, G + 2, H), (axes.EMBED_IN, *qkv_axes), D)
        self.output = weight(rngs, (K, G, H, D), (*qkv_axes, axes.EMBED_IN), K * G * H)
        if config.qkv_bias:
            self.qkv_bias = constant(0.0, (K, G + 2, H), qkv_axes)
        if config.output_bias:
            self.output_bias = constant(0.0, (D,), (axes.EMBED_IN,))
        if config.qk_norm:
            self.query_norm = RMSNorm(H, config.norm_epsilon, axes.HEAD_DIM)
            self.key_norm = RMSNorm(H, config.norm_epsilon, axes.HEAD_DIM)
        self.config = config
        self.window = window

    def __call__(self, x_BTD: jax.Array, by: Rotation, attend_layer: AttendLayer) -> jax.Array:
        q_BTKGH, new = self._project(x_BTD, by)
        out_BTKGH = attend_layer(q_BTKGH, new)
        out_BTD = self._merge_heads(out_BTKGH)
        if self.config.output_bias:
            out_BTD = out_BTD + self.output_bias[...][None, None]
        return out_BTD

    def _merge_heads(self, out_BTKGH: jax.Array) -> jax.Array:
        # heads and their entries as one axis: given three, XLA lays the weights out anew each call
        B, T = out_BTKGH.shape[:2]
        weight_AD = self.output[...].reshape(-1, self.config.embed)
        return jnp.einsum("BTA,AD->BTD", out_BTKGH.reshape(B, T, -1), weight_AD)

    def _project(self, x_BTD: jax.Array, by: Rotation) -> tuple[jax.Array, PromptKeysValues]:
        qkv_BTKJH = jnp.einsum("BTD,DKJH->BTKJH", x_BTD, self.qkv[...])
        if self.config.qkv_bias:
            qkv_BTKJH = qkv_BTKJH + self.qkv_bias[...][None, None]
        G = self.config.heads_per_kv
        q_BTKGH, k_BTKH, v_BTKH = (
            qkv_BTKJH[..., :G, :],
            qkv_BTKJH[..., G, :],
            qkv_BTKJH[..., G + 1, :],
        )
        if self.config.qk_norm:
            q_BTKGH, k_BTKH = self.query_norm(q_BTKGH), self.key_norm(k_BTKH)
        B, T, K, _, H = q_BTKGH.shape
        q_BTNH = rotate(q_BTKGH.reshape(B, T, K * G, H), by)
        k_BTKH = rotate(k_BTKH, by)
        new = PromptKeysValues(k_BTKH.transpose(0, 2, 3, 1), v_BTKH.swapaxes(1, 2))
        return q_BTNH.reshape(B, T, K, G, H), new


class Block(nnx.Module):
    """Pre-norm residual block: attention, then MLP."""

    def __init__(self, rngs: nnx.Rngs, config: DecoderConfig, window: int | None):
        self.attention_norm = RMSNorm(config.embed, config.norm_epsilon, axes.EMBED_IN)
        self.attention = Attention(rngs, config, window)
        self.mlp_norm = RMSNorm(config.embed, config.norm_epsilon, axes.EMBED_IN)
        self.mlp = GatedMlp(rngs, config.embed, config.mlp, use_bias=config.mlp_bias)

    def __call__(self, x_BTD: jax.Array, by: Rotation, attend_layer: AttendLayer) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), by, attend_layer)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Decoder(nnx.Module):
    """Embedding, blocks, final norm and head."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        rngs: nnx.Rngs,
        attend: Attend = attend_dense,
        constrain: Constrain = unconstrained,
    ):
        self.embedding = Embedding(rngs, config.vocab_size, config.embed)
        self.layers = nnx.List(Block(rngs, config, window) for window in config.windows)
        self.final_norm = RMSNorm(config.embed, config.norm_epsilon, axes.EMBED_IN)
        if not config.tie_embeddings:
            self.head = Embedding(rngs, config.vocab_size, config.embed)
        self.config = config
        self.attend = attend
        self.constrain = constrain

    def prefill(
        self, tokens_BT: jax.Array, true_length_B: jax.Array
    ) -> tuple[jax.Array, tuple[PromptKeysValues, ...]]:
        """Final hidden states `x_BTD` of right-padded prompts, and each layer's keys and values.

        Padding follows the tokens, so causality alone hides it from them; its own outputs mean
        nothing.
        """
        T = tokens_BT.shape[1]
        position_1T = np.arange(T)[None]
        key_position_BT = jnp.where(position_1T < true_length_B[:, None], position_1T, -1)
        kept: list[PromptKeysValues] = []

        def attend_layer(window: int | None) -> AttendLayer:
            def attend_self(q_BTKGH: jax.Array, new: PromptKeysValues) -> jax.Array:
                kept.append(new)
                k_BKHT, v_BKTH = new
                return attend_prompt(self.attend, q_BTKGH, k_BKHT, v_BKTH, key_position_BT, window)

            return attend_self

        x_BTD = self._blocks(tokens_BT, position_1T, attend_layer)
        return x_BTD, tuple(kept)

    def decode(
        self, token_B: jax.Array, position_B: jax.Array, cache: KVCache
    ) -> tuple[jax.Array, KVCache]:
        """`logits_BV` after one more token per row, written into the cache at its position."""
        key_position_BS = append_position(cache.position_BS, position_B)
        remaining = list(cache.layers)
        written: list[KeysValues] = []

        def attend_layer(window: int | None) -> AttendLayer:
            def attend_cache(q_BTKGH: jax.Array, new: PromptKeysValues) -> jax.Array:
                kv = append(remaining[len(written)], new, position_B)
                written.append(kv)
                position_B1 = position_B[:, None]
                return attend_cached(self.attend, q_BTKGH, kv, position_B1, key_position_BS, window)

            return attend_cache

        x_B1D = self._blocks(token_B[:, None], position_B[:, None], attend_layer)
        return self.logits(x_B1D[:, 0]), KVCache(tuple(written), key_position_BS)

    def logits(self, x_BD: jax.Array) -> jax.Array:
        """Float32 logits of final hidden states."""
        head = self.embedding if self.config.tie_embeddings else self.head
        logits_BV = head.logits(x_BD)
        return self.constrain(logits_BV, (axes.BATCH, axes.VOCAB))

    def _blocks(
        self,
        tokens_BT: jax.Array,
        position_BT: jax.Array | np.ndarray,
        attend_layer: Callable[[int | None], AttendLayer],
    ) -> jax.Array:
        block_axes = (axes.BATCH, axes.QUERY_LENGTH, axes.EMBED)
        by = rotation(position_BT, self.config.rope, self.config.head_dim)
        x_BTD = self.constrain(self.embedding(tokens_BT), block_axes)
        for block, window in zip(self.layers, self.config.windows, strict=True):
            x_BTD = self.constrain(block(x_BTD, by, attend_layer(window)), block_axes)
        return self.final_norm(x_BTD)
