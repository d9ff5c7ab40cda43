"""Grouped-query attention: each key/value head is shared by a group of query heads.

Source: Ainslie et al. 2023, "GQA" (2305.13245). Knows nothing of caches, masks or meshes.
"""

import jax
from flax import nnx
from jax.experimental.layout import Layout as MemoryLayout
from jax.experimental.layout import with_layout_constraint

from . import axes
from .attention.attend import Queries
from .attention.layer_attention import HeadInputs
from .cache.layer_state import PromptKeysValues
from .config import Arrangement, DecoderConfig
from .layer_config import Attention
from .layers import HeadsNorm, Norm, constant, merge_heads, weight
from .operations import Operations
from .rope import PositionCode, encode
from .weights.product import Product, einsum


class GroupedHeads(nnx.Module):
    """Projections of grouped-query attention, before and after the attention of the layer."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        config: DecoderConfig,
        attention: Attention,
        arrangement: Arrangement,
    ):
        D, H = config.embed, attention.head_dim
        copies = arrangement.kv_copies(attention.num_kv_heads)
        K, G = attention.num_kv_heads * copies, attention.heads_per_kv // copies
        heads = (axes.QUERY_HEADS, "", "")
        self.qkv = weight(rngs, (D, K, G + 2, H), (axes.EMBED_IN, *heads))
        self.output = weight(rngs, (K, G, H, D), (*heads, axes.EMBED_IN), inputs=(0, 1, 2))
        if attention.qkv_bias:
            self.qkv_bias = constant(0.0, (K, G + 2, H), heads)
        if attention.output_bias:
            self.output_bias = constant(0.0, (D,), ("",))
        if attention.qk_norm:
            self.query_norm, self.key_norm = _query_key_norms(config, attention, copies)
        if attention.has_sinks:
            self.sinks = constant(0.0, (K, G), heads[:2])
        self.options = attention

    def project(
        self, x_BTD: jax.Array, code: PositionCode, operations: Operations, *, reads_cache: bool
    ) -> HeadInputs:
        """The queries, keys and values of the tokens."""
        del reads_cache
        product = einsum("BTD,DKJH->BTKJH")
        qkv_BTKJH = operations.project(product, x_BTD, self.qkv, axes.RESIDUAL, axes.HEADS)
        qkv_BTKJH = jax.lax.platform_dependent(
            qkv_BTKJH, tpu=_with_heads_last, default=lambda qkv_BTKJH: qkv_BTKJH
        )
        if self.options.qkv_bias:
            qkv_BTKJH = qkv_BTKJH + self.qkv_bias[...][None, None]
        G = qkv_BTKJH.shape[3] - 2
        q_BTKGH, k_BTKH, v_BTKH = (
            qkv_BTKJH[..., :G, :],
            qkv_BTKJH[..., G, :],
            qkv_BTKJH[..., G + 1, :],
        )
        if self.options.qk_norm:
            q_BTKGH, k_BTKH = self.query_norm(q_BTKGH), self.key_norm(k_BTKH)
        B, T, K, _, H = q_BTKGH.shape
        q_BTNH, k_BTKH = encode(q_BTKGH.reshape(B, T, K * G, H), k_BTKH, code)
        new = PromptKeysValues(k_BTKH.transpose(0, 2, 3, 1), v_BTKH.swapaxes(1, 2))
        sink_KG = self.sinks[...] if self.options.has_sinks else None
        return HeadInputs(x_BTD, Queries(q_BTNH.reshape(B, T, K, G, H), sink_KG), new, None)

    def merge(self, inputs: HeadInputs, out_BTKGH: jax.Array, operations: Operations) -> jax.Array:
        """The term that attention adds to the residual stream."""
        del inputs
        merge = Product("BTKGH,KGHD->BTD", merge_heads)
        out_BTD = operations.project(merge, out_BTKGH, self.output, axes.HEADS, axes.RESIDUAL)
        if self.options.output_bias:
            out_BTD = out_BTD + self.output_bias[...][None, None]
        return out_BTD


def _with_heads_last(qkv_BTKJH: jax.Array) -> jax.Array:
    """Give heads a memory layout with head features as minor dimension, if these fill tiles.

    From 128 rows on, XLA for TPU would make rows the minor dimension, and for that change the
    memory layout of the weights of all layers in every call.
    """
    if qkv_BTKJH.shape[-1] % axes.LANES:
        return qkv_BTKJH
    # the axis before head features is rows if each row has one token, else tokens, so that the last
    # two axes fill a tile
    order = (1, 2, 3, 0, 4) if qkv_BTKJH.shape[1] == 1 else (2, 3, 0, 1, 4)
    return with_layout_constraint(qkv_BTKJH, MemoryLayout(major_to_minor=order))


def _query_key_norms(
    config: DecoderConfig, attention: Attention, kv_copies: int
) -> tuple[Norm, Norm]:
    if attention.qk_norm == "head":
        return Norm(attention.head_dim, config), Norm(attention.head_dim, config)
    query_norm = HeadsNorm(attention.num_query_heads, config, attention)
    return query_norm, HeadsNorm(attention.num_kv_heads, config, attention, kv_copies)
