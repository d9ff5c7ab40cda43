"""The products of a layer with its weights, noted while its block is traced.

What a layer multiplies follows from its definition alone: whoever predicts its work, or what it
sends, reads a record, so a new block needs no second description. Knows nothing of layouts or
hardware.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx

from . import axes
from .attention import Queries
from .block import make_block
from .config import Arrangement, DecoderConfig
from .layer_attention import LayerAttention
from .layer_cache import PromptKeysValues, PromptLatents
from .layers import Embedding
from .moe.config import Dispatch
from .moe.experts import ExpertWeights
from .moe.layer import ExpertCall
from .moe.mix import Mixture, MoeOutput
from .moe.routing import Router
from .operations import Axes, Operations, Product, axes_of
from .rope import position_code

if TYPE_CHECKING:
    from .operations import Weight


@dataclass(frozen=True)
class WeightProduct:
    """A product of activations and a weight."""

    equation: str
    x: Axes
    weight: Axes
    out: Axes
    sizes: Mapping[str, int]
    """By dimension letter; rows B and tokens T are 1."""
    reads: int
    """The number of the array that it reads: products of a layer with the same one share it."""
    adds_to: int
    """The number of the sum that its result joins, where that is the residual stream."""

    @property
    def labels(self) -> tuple[str, str, str]:
        """Dimension letters of the activations, the weight and the result."""
        inputs, out = self.equation.split("->")
        x, weight = inputs.split(",")
        return x, weight, out

    @property
    def num_weights(self) -> int:
        """Entries of the weight."""
        return math.prod(self.sizes[label] for label in self.labels[1])


class LayerRecord(Operations):
    """The operations of one device, which note what a layer asks of them."""

    num_kv_heads: int
    """Key/value heads of the projections, copies included."""
    head_dims: tuple[int, int]
    """Entries of a head of queries and keys, and of values, as attention has them."""
    makes_keys: bool
    """Whether projections make keys and values of each head, for attention to read."""

    def __init__(self):
        self.products: list[WeightProduct] = []
        self.mixture: WeightProduct | None = None
        """A mixture of experts as one product, which has no weight itself."""
        self.expert_products: list[WeightProduct] = []
        """Products of all experts at once: each row of activations meets one expert."""
        self._seen: list[jax.Array] = []
        self._num_sums = 0

    def project(
        self, equation: str, product: Product, x: jax.Array, weight: "Weight", x_axes: Axes = (),
        out_axes: Axes = (),
    ) -> jax.Array:  # fmt: skip
        logical_axes = axes_of(weight)
        products = self.expert_products if axes.EXPERTS in logical_axes else self.products
        of_product = self._product(equation, x, weight.shape, x_axes, logical_axes, out_axes)
        products.append(of_product)
        return super().project(equation, product, x, weight, x_axes, out_axes)

    def constrain(self, x: jax.Array, logical_axes: Axes) -> jax.Array:
        self._num_sums += logical_axes == axes.RESIDUAL
        return x

    def mix_experts(
        self, mixture: Mixture, x_BTD: jax.Array, is_token_BT: jax.Array, router: Router,
        weights: ExpertWeights,
    ) -> MoeOutput:  # fmt: skip
        residual = axes.RESIDUAL
        self.mixture = self._product("BTD,->BTD", x_BTD, (), residual, (), residual)
        # ragged products are of all experts, tiles of one
        mixture = replace(mixture, dispatch=Dispatch("ragged"), project=self.project)
        return mixture(x_BTD, is_token_BT, router, weights)

    def attend_by_shape(
        self, queries: Queries, new: PromptKeysValues | None, latents: PromptLatents | None
    ) -> tuple[jax.Array, None]:
        """Zeros of the shape that a layer's attention gives."""
        kept = latents if new is None else new
        assert kept is not None, "a layer attends to something"
        *heads, dim = queries.q_BTKGH.shape
        self.head_dims = dim, kept[-1].shape[-1]
        self.num_kv_heads, self.makes_keys = heads[2], new is not None
        return jnp.zeros((*heads, self.head_dims[1])), None

    def _product(
        self, equation: str, x: jax.Array, shape: tuple[int, ...], x_axes: Axes, weight_axes: Axes,
        out_axes: Axes,
    ) -> WeightProduct:  # fmt: skip
        # kept, as another array may have the identity of one that is gone
        self._seen.append(x)
        labels = equation.partition("->")[0].replace(",", "")
        sizes = dict(zip(labels, (*x.shape, *shape), strict=True))
        return WeightProduct(equation, x_axes, weight_axes, out_axes, sizes, id(x), self._num_sums)


@cache
def record_layer(
    config: DecoderConfig, layer: int, kv_copies: int, *, reads_cache: bool
) -> LayerRecord:
    """The record of a layer, as it runs over whole prompts or as it reads the cache."""
    record = LayerRecord()

    def run() -> None:
        block = make_block(nnx.Rngs(0), config, Arrangement(kv_copies), range(layer, layer + 1))
        rope = config.rope_of(config.windows[layer])
        by = position_code(jnp.zeros((1, 1), jnp.int32), rope, config.rope_dim)
        experts = ExpertCall(jnp.ones((1, 1), bool))
        layer_attention = LayerAttention(record.attend_by_shape, reads_cache)
        block(jnp.zeros((1, 1, config.embed)), by, layer_attention, record, experts)

    jax.eval_shape(run)
    return record


@cache
def record_logits(config: DecoderConfig) -> WeightProduct:
    """The product with the vocabulary; its rows B are the tokens that get logits."""
    record = LayerRecord()

    def run() -> None:
        head = Embedding(nnx.Rngs(0), config.vocab_size, config.embed)
        head.logits(jnp.zeros((1, config.embed)), record)

    jax.eval_shape(run)
    return record.products[0]
