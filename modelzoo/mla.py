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

import jax
import jax.numpy as jnp
from flax import nnx

from . import axes
from .attention.attend import Queries
from .attention.layer_attention import HeadInputs
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
        self.key_up = weight(rngs, (N, latent.plain_dim, rank), head_axes, (2,), is_matrix=False)
        self.value_up = weight(rngs, (N, latent.value_dim, rank), head_axes, (2,), is_matrix=False)
        output_axes = (axes.QUERY_HEADS, "", axes.EMBED_IN)
        self.output = weight(rngs, (N, latent.value_dim, D), output_axes, inputs=(0, 1))
        self.sizes = latent

    def project(
        self, x_BTD: jax.Array, code: PositionCode, operations: Operations, *, reads_cache: bool
    ) -> HeadInputs:
        """The queries and latents of the tokens, and keys and values if only these are read."""
        assert isinstance(code, Rotation), "configurations of latent attention rotate"
        q_BTNH = self._queries(x_BTD, operations)
        plain_BTNH, rotated_BTNH = jnp.split(q_BTNH, [self.sizes.plain_dim], axis=-1)
        latents = self._latents(x_BTD, code, operations)
        rotated_BTNH, new = rotate(rotated_BTNH, code), None
        if reads_cache:
            # latents are the keys and values of all heads
            absorbed, heads = einsum("BTNH,NHI->BTNI"), axes.LATENT_HEADS
            plain_BTNH = operations.project(absorbed, plain_BTNH, self.key_up, heads, heads)
        else:
            new = self._keys_values(latents, rotated_BTNH.shape, operations)
        q_BTNH = jnp.concatenate([plain_BTNH, rotated_BTNH], axis=-1)
        return HeadInputs(x_BTD, Queries(q_BTNH[:, :, :, None]), new, latents)

    def merge(self, inputs: HeadInputs, out_BTKGH: jax.Array, operations: Operations) -> jax.Array:
        """The term that attention adds to the residual stream."""
        out_BTNH, heads = out_BTKGH[:, :, :, 0], axes.LATENT_HEADS
        if inputs.new is None:
            up, out_BTNI = einsum("BTNI,NHI->BTNH"), out_BTNH[..., : self.sizes.rank]
            out_BTNH = operations.project(up, out_BTNI, self.value_up, heads, heads)
        merge = Product("BTNH,NHD->BTD", merge_heads)
        return operations.project(merge, out_BTNH, self.output, heads, axes.RESIDUAL)

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

    def _keys_values(
        self, latents: PromptLatents, rotated_shape: tuple[int, ...], operations: Operations
    ) -> PromptKeysValues:
        """Keys and values that are computed for each head."""
        x_BTI, key_BTH = jnp.split(latents.latent_BTH, [self.sizes.rank], axis=-1)
        up, heads = einsum("BTI,NHI->BTNH"), axes.LATENT_HEADS
        k_BTNH = operations.project(up, x_BTI, self.key_up, axes.LATENTS, heads)
        v_BTNH = operations.project(up, x_BTI, self.value_up, axes.LATENTS, heads)
        shared_BTNH = jnp.broadcast_to(key_BTH[:, :, None], rotated_shape)
        k_BTNH = jnp.concatenate([k_BTNH, shared_BTNH], axis=-1)
        return PromptKeysValues(k_BTNH.transpose(0, 2, 3, 1), v_BTNH.swapaxes(1, 2))
