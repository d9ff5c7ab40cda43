"""Blocks of the residual stream: attention and MLP, one after the other or in parallel.

Knows nothing of caches, positions or the keys that a layer attends to.
"""

from typing import Any

import jax
from flax import nnx

from . import axes
from .attention.layer_attention import LayerAttention
from .config import Arrangement, DecoderConfig
from .gqa import GroupedHeads
from .layers import GatedMlp, NoNorm, Norm, PlainMlp, scale_by
from .mla import LatentHeads
from .moe.call import ExpertCall
from .moe.layer import SparseMlp
from .moe_config import MoeConfig
from .operations import Operations
from .rope import PositionCode


class Block(nnx.Module):
    """Residual block: attention, then MLP, with the norms of the configuration."""

    def __init__(
        self,
        rngs: nnx.Rngs,
        config: DecoderConfig,
        arrangement: Arrangement,
        moe: MoeConfig | None = None,
        has_attention_norm: bool = True,
    ):
        """The MLP is a mixture of experts if `moe` is given."""

        def norm(placement: str, others: tuple[str, ...] = ("both",)) -> Norm | NoNorm:
            is_used = config.norm_placement in (placement, *others)
            return Norm(config.embed, config) if is_used else NoNorm()

        self.attention_norm = norm("before") if has_attention_norm else NoNorm()
        self.attention = _attention(rngs, config, arrangement)
        self.attention_post_norm = norm("after")
        self.mlp_norm = norm("before")
        self.mlp = _mlp(rngs, config, moe)
        self.mlp_post_norm = norm("after")
        self.attention_residual_norm = norm("residual", ())
        self.mlp_residual_norm = norm("residual", ())
        self.multiplier = config.multipliers.residual

    def __call__(
        self,
        x_BTD: jax.Array,
        code: PositionCode,
        layer_attention: LayerAttention,
        operations: Operations,
        experts: ExpertCall,
    ) -> tuple[jax.Array, Any]:
        """The residual stream after the layer, and the cache update of its attention."""
        normed_BTD = self.attention_norm(x_BTD)
        out_BTD, cache_update = self.attention(normed_BTD, code, layer_attention, operations)
        x_BTD = x_BTD + scale_by(self.attention_post_norm(out_BTD), self.multiplier)
        x_BTD = self.attention_residual_norm(x_BTD)
        x_BTD = operations.constrain(x_BTD, axes.RESIDUAL)
        out_BTD = self.mlp(self.mlp_norm(x_BTD), operations, experts)
        x_BTD = x_BTD + scale_by(self.mlp_post_norm(out_BTD), self.multiplier)
        x_BTD = self.mlp_residual_norm(x_BTD)
        return operations.constrain(x_BTD, axes.RESIDUAL), cache_update


class ParallelBlock(nnx.Module):
    """Residual block in which attention and MLP read the same norm, in parallel.

    Source: Wang and Komatsuzaki 2021, "GPT-J-6B".
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        config: DecoderConfig,
        arrangement: Arrangement,
        moe: MoeConfig | None = None,
    ):
        """The MLP is a mixture of experts if `moe` is given."""
        self.norm = Norm(config.embed, config)
        self.attention = _attention(rngs, config, arrangement)
        self.mlp = _mlp(rngs, config, moe)
        self.multiplier = config.multipliers.residual

    def __call__(
        self,
        x_BTD: jax.Array,
        code: PositionCode,
        layer_attention: LayerAttention,
        operations: Operations,
        experts: ExpertCall,
    ) -> tuple[jax.Array, Any]:
        """The residual stream after the layer, and the cache update of its attention."""
        normed_BTD = self.norm(x_BTD)
        out_BTD, cache_update = self.attention(normed_BTD, code, layer_attention, operations)
        out_BTD = out_BTD + self.mlp(normed_BTD, operations, experts)
        x_BTD = x_BTD + scale_by(out_BTD, self.multiplier)
        return operations.constrain(x_BTD, axes.RESIDUAL), cache_update


def make_block(
    rngs: nnx.Rngs, config: DecoderConfig, arrangement: Arrangement, layers: range
) -> Block | ParallelBlock:
    """Make the block of some layers, with the weights of all of them stacked if it is scanned."""
    has_attention_norm, _, is_sparse = config.block_kinds[layers.start]
    moe = config.moe if is_sparse else None

    def block(rngs: nnx.Rngs) -> Block | ParallelBlock:
        if config.is_parallel:
            return ParallelBlock(rngs, config, arrangement, moe)
        return Block(rngs, config, arrangement, moe, has_attention_norm)

    if len(layers) == 1:
        return block(rngs)

    @nnx.split_rngs(splits=len(layers))
    @nnx.vmap
    def blocks(rngs: nnx.Rngs) -> Block | ParallelBlock:
        return block(rngs)

    return blocks(rngs)


def _attention(
    rngs: nnx.Rngs, config: DecoderConfig, arrangement: Arrangement
) -> GroupedHeads | LatentHeads:
    if config.latent is not None:
        return LatentHeads(rngs, config, config.latent)
    return GroupedHeads(rngs, config, arrangement)


def _mlp(
    rngs: nnx.Rngs, config: DecoderConfig, moe: MoeConfig | None
) -> GatedMlp | PlainMlp | SparseMlp:
    if moe is not None:
        return SparseMlp(rngs, config, moe)
    return GatedMlp(rngs, config) if config.is_gated else PlainMlp(rngs, config)
