"""Blocks of the residual stream: attention and MLP, one after the other or in parallel.

A block has two halves. `project` computes the queries, keys and values, the caller attends, and
`finish` returns the residual stream after the layer.

Knows nothing of caches, positions or the keys that a layer attends to.
"""

import jax
from flax import nnx

from . import axes
from .attention.layer_attention import HeadInputs
from .config import Arrangement, DecoderConfig
from .gqa import GroupedHeads
from .layer_config import Attention, Experts, Layer, Mlp
from .layers import DenseMlp, NoNorm, Norm, scale_by
from .mla import LatentHeads
from .moe.call import ExpertCall
from .moe.layer import SparseMlp
from .operations import Operations
from .rope import PositionCode


class Block(nnx.Module):
    """Residual block: attention, then MLP, with their norms; either may be absent.

    In a parallel block, both read the same norm, and their sum is added to the residual stream.
    Source: Wang and Komatsuzaki 2021, "GPT-J-6B".
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        config: DecoderConfig,
        layer: Layer,
        arrangement: Arrangement,
    ):
        def norm(placement: str, others: tuple[str, ...] = ("both",)) -> Norm | NoNorm:
            is_used = layer.norm_placement in (placement, *others)
            return Norm(config.embed, config) if is_used else NoNorm()

        self.has_mlp, self.is_parallel = layer.feed_forward is not None, layer.is_parallel
        if layer.attention is not None:
            self.attention = _attention(rngs, config, layer.attention, arrangement)
        if layer.feed_forward is not None:
            self.mlp = _mlp(rngs, config.embed, layer.feed_forward)
        if self.is_parallel:
            self.norm = Norm(config.embed, config)
        elif layer.attention is not None:
            self.attention_norm = norm("before") if layer.has_attention_norm else NoNorm()
            self.attention_post_norm = norm("after")
            self.attention_residual_norm = norm("residual", ())
        if self.has_mlp and not self.is_parallel:
            self.mlp_norm = norm("before")
            self.mlp_post_norm = norm("after")
            self.mlp_residual_norm = norm("residual", ())
        self.multiplier = config.multipliers.residual

    def project(
        self, x_BTD: jax.Array, code: PositionCode, operations: Operations, *, reads_cache: bool
    ) -> HeadInputs:
        """The inputs of the attention of the layer.

        Args:
          x_BTD: The residual stream before the layer.
          code: The positions of the tokens.
          operations: The operations of the call.
          reads_cache: Whether queries attend to the cache, not only to the prompt.
        """
        normed_BTD = (self.norm if self.is_parallel else self.attention_norm)(x_BTD)
        return self.attention.project(normed_BTD, code, operations, reads_cache=reads_cache)

    def finish(
        self,
        x_BTD: jax.Array,
        inputs: HeadInputs | None,
        out_BTKGH: jax.Array | None,
        operations: Operations,
        experts: ExpertCall,
    ) -> jax.Array:
        """The residual stream after the layer.

        Args:
          x_BTD: The residual stream before the layer.
          inputs: The inputs of attention; None in a layer without attention.
          out_BTKGH: The output of attention.
          operations: The operations of the call.
          experts: The call of sparse layers.
        """
        if inputs is not None and out_BTKGH is not None:
            out_BTD = self.attention.merge(inputs, out_BTKGH, operations)
            if self.is_parallel:
                out_BTD = out_BTD + self.mlp(inputs.x_BTD, operations, experts)
                x_BTD = x_BTD + scale_by(out_BTD, self.multiplier)
                return operations.constrain(x_BTD, axes.RESIDUAL)
            x_BTD = x_BTD + scale_by(self.attention_post_norm(out_BTD), self.multiplier)
            x_BTD = self.attention_residual_norm(x_BTD)
            x_BTD = operations.constrain(x_BTD, axes.RESIDUAL)
        if self.has_mlp:
            out_BTD = self.mlp(self.mlp_norm(x_BTD), operations, experts)
            x_BTD = x_BTD + scale_by(self.mlp_post_norm(out_BTD), self.multiplier)
            x_BTD = self.mlp_residual_norm(x_BTD)
            x_BTD = operations.constrain(x_BTD, axes.RESIDUAL)
        return x_BTD


def make_block(
    rngs: nnx.Rngs, config: DecoderConfig, arrangement: Arrangement, layers: range
) -> Block:
    """Make the block of some layers, with the weights of all of them stacked if it is scanned."""
    layer = config.layers[layers.start]

    def block(rngs: nnx.Rngs) -> Block:
        return Block(rngs, config, layer, arrangement)

    if len(layers) == 1:
        return block(rngs)

    @nnx.split_rngs(splits=len(layers))
    @nnx.vmap
    def blocks(rngs: nnx.Rngs) -> Block:
        return block(rngs)

    return blocks(rngs)


def _attention(
    rngs: nnx.Rngs, config: DecoderConfig, attention: Attention, arrangement: Arrangement
) -> GroupedHeads | LatentHeads:
    if attention.latent is not None:
        return LatentHeads(rngs, config, attention.num_query_heads, attention.latent)
    return GroupedHeads(rngs, config, attention, arrangement)


def _mlp(rngs: nnx.Rngs, embed: int, options: Mlp | Experts) -> DenseMlp | SparseMlp:
    if isinstance(options, Experts):
        return SparseMlp(rngs, embed, options)
    return DenseMlp(rngs, embed, options)
