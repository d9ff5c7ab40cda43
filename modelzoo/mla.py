"""Multi-head latent attention: keys and values of all heads are computed from one latent per token.

The cache holds one latent and one rotated key per token, shared by all heads. A prompt attends to
keys and values that are computed from its latents for each head. A token that reads the cache
attends to the latents themselves ("absorbed"): the projection to keys is applied to its queries
instead, and the projection to values to its attention outputs. Both are linear, so scores and
result are the same.

Source: DeepSeek-V2 (2405.04434), section 2.1 and appendix C; section 2.1.2 describes the
absorption. Knows nothing of caches, masks or meshes.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from . import axes
from .attention.attend import Queries
from .attention.layer_attention import LayerAttention
from .cache.layer_state import PromptKeysValues, PromptLatents
from .config import DecoderConfig
from .latent_config import LatentAttention
from .layers import Norm, merge_heads, weight
from .operations import Operations
from .rope import PositionCode, Rotation, rotate
from .weights.product import Product, einsum


class LatentHeads(nnx.Module):
    """Projections of latent attention, before and after the attention of the layer."""

    def __init__(
        self, rngs: nnx.Rngs, config: DecoderConfig, num_heads: int, latent: LatentAttention
    ):
        D, N, rank = config.embed, num_heads, latent.rank
        latent_config = replace(config, norm_epsilon=latent.norm_epsilon)
        query_in, query_axis = D, axes.EMBED_IN
        if latent.query_rank is not None:
            query_in, query_axis = latent.query_rank, ""
            self.query_down = weight(rngs, (D, query_in), (axes.EMBED_IN, ""))
            self.query_norm = Norm(query_in, latent_config)
        query_axes = (query_axis, axes.QUERY_HEADS, "")
        self.query = weight(rngs, (query_in, N, latent.head_dim), query_axes)
        self.latent_down = weight(rngs, (D, latent.cache_dim), (axes.EMBED_IN, ""))
        self.latent_norm = Norm(rank, latent_config)
        head_axes = (axes.QUERY_HEADS, "", "")
        self.key_up = weight(rngs, (N, latent.plain_dim, rank), head_axes, inputs=(2,))
        self.value_up = weight(rngs, (N, latent.value_dim, rank), head_axes, inputs=(2,))
        output_axes = (axes.QUERY_HEADS, "", axes.EMBED_IN)
        self.output = weight(rngs, (N, latent.value_dim, D), output_axes, inputs=(0, 1))
        self.sizes = latent

    def __call__(
        self,
        x_BTD: jax.Array,
        code: PositionCode,
        layer_attention: LayerAttention,
        operations: Operations,
    ) -> tuple[jax.Array, Any]:
        """The term that attention adds to the residual stream, and the cache update."""
        assert isinstance(code, Rotation), "configurations of latent attention rotate"
        q_BTNH = self._queries(x_BTD, operations)
        plain_BTNH, rotated_BTNH = jnp.split(q_BTNH, [self.sizes.plain_dim], axis=-1)
        latents = self._latents(x_BTD, code, operations)
        attend = self._attend_latents if layer_attention.reads_cache else self._attend_heads
        rotated_BTNH = rotate(rotated_BTNH, code)
        out_BTNH, cache_update = attend(
            plain_BTNH, rotated_BTNH, latents, layer_attention, operations
        )
        merge = Product("BTNH,NHD->BTD", merge_heads)
        out_BTD = operations.project(merge, out_BTNH, self.output, axes.LATENT_HEADS, axes.RESIDUAL)
        return out_BTD, cache_update

    def _queries(self, x_BTD: jax.Array, operations: Operations) -> jax.Array:
        """Queries, before the rotation of their last features."""
        project, heads = operations.project, axes.LATENT_HEADS
        if self.sizes.query_rank is None:
            return project(einsum("BTD,DNH->BTNH"), x_BTD, self.query, axes.RESIDUAL, heads)
        down, up = einsum("BTD,DI->BTI"), einsum("BTI,INH->BTNH")
        x_BTI = project(down, x_BTD, self.query_down, axes.RESIDUAL, axes.LATENTS)
        return project(up, self.query_norm(x_BTI), self.query, axes.LATENTS, heads)

    def _latents(
        self, x_BTD: jax.Array, rotation: Rotation, operations: Operations
    ) -> PromptLatents:
        """The cache entries of tokens: the normed latent, then the rotated key."""
        down = einsum("BTD,DH->BTH")
        latent_BTH = operations.project(down, x_BTD, self.latent_down, axes.RESIDUAL, axes.LATENTS)
        x_BTI, key_BTH = jnp.split(latent_BTH, [self.sizes.rank], axis=-1)
        key_BTH = rotate(key_BTH[:, :, None], rotation)[:, :, 0]
        return PromptLatents(jnp.concatenate([self.latent_norm(x_BTI), key_BTH], axis=-1))

    def _attend_heads(
        self,
        plain_BTNH: jax.Array,
        rotated_BTNH: jax.Array,
        latents: PromptLatents,
        layer_attention: LayerAttention,
        operations: Operations,
    ) -> tuple[jax.Array, Any]:
        """Attend with keys and values that are computed for each head."""
        x_BTI, key_BTH = jnp.split(latents.latent_BTH, [self.sizes.rank], axis=-1)
        up, heads = einsum("BTI,NHI->BTNH"), axes.LATENT_HEADS
        k_BTNH = operations.project(up, x_BTI, self.key_up, axes.LATENTS, heads)
        v_BTNH = operations.project(up, x_BTI, self.value_up, axes.LATENTS, heads)
        shared_BTNH = jnp.broadcast_to(key_BTH[:, :, None], rotated_BTNH.shape)
        k_BTNH = jnp.concatenate([k_BTNH, shared_BTNH], axis=-1)
        q_BTNH = jnp.concatenate([plain_BTNH, rotated_BTNH], axis=-1)
        new = PromptKeysValues(k_BTNH.transpose(0, 2, 3, 1), v_BTNH.swapaxes(1, 2))
        queries = Queries(q_BTNH[:, :, :, None])
        out_BTNGH, cache_update = layer_attention.attend(queries, new, latents)
        return out_BTNGH[:, :, :, 0], cache_update

    def _attend_latents(
        self,
        plain_BTNH: jax.Array,
        rotated_BTNH: jax.Array,
        latents: PromptLatents,
        layer_attention: LayerAttention,
        operations: Operations,
    ) -> tuple[jax.Array, Any]:
        """Attend with latents as the keys and values of all heads."""
        absorbed, heads = einsum("BTNH,NHI->BTNI"), axes.LATENT_HEADS
        q_BTNI = operations.project(absorbed, plain_BTNH, self.key_up, heads, heads)
        q_BTNH = jnp.concatenate([q_BTNI, rotated_BTNH], axis=-1)
        queries = Queries(q_BTNH[:, :, :, None])
        out_BTNGH, cache_update = layer_attention.attend(queries, None, latents)
        up, out_BTNI = einsum("BTNI,NHI->BTNH"), out_BTNGH[:, :, :, 0, : self.sizes.rank]
        return operations.project(up, out_BTNI, self.value_up, heads, heads), cache_update
