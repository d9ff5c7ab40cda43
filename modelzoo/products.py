"""Record of the products of a layer with its weights, taken while its block is traced.

The record follows from the definition of the layer. Predictions of work and of communication read
it, so a new block needs no second description. Knows nothing of layouts or hardware.
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
from .attention.layer_attention import HeadInputs
from .block import make_block
from .config import Arrangement, DecoderConfig
from .layers import Embedding
from .moe.call import ExpertCall
from .moe.experts import ExpertWeights
from .moe.mix import Mixture, MoeOutput
from .moe.routing import Router
from .moe_config import Dispatch
from .operations import Operations
from .rope import position_code
from .weights.product import Labels, Product
from .weights.weight_products import Axes, axes_of

if TYPE_CHECKING:
    from .weights.weight_products import Weight


@dataclass(frozen=True)
class WeightProduct:
    """A product of activations and a weight."""

    parameter: str
    """The dotted path of the weight in its block, or in the model for the head; empty for a product
    without a weight."""
    equation: str
    x: Axes
    weight: Axes
    out: Axes
    sizes: Mapping[str, int]
    """The size of each dimension letter; rows B and tokens T have size 1."""
    reads: int
    """An identifier of the activations: products of a layer with the same one read the same
    array."""
    adds_to: int
    """The number of the residual addition that the result belongs to, counted within the layer."""

    @property
    def labels(self) -> Labels:
        """Dimension letters of the activations, the weight and the result."""
        return Labels.of(self.equation)

    @property
    def num_weights(self) -> int:
        """The number of elements of the weight."""
        return math.prod(self.sizes[label] for label in self.labels.weight)


class LayerRecord(Operations):
    """The operations of one device, which record the calls of a layer."""

    num_kv_heads: int
    """The number of key/value heads of the projections, copies included."""
    head_dims: tuple[int, int]
    """The head size of queries and keys, and that of values, in attention."""
    makes_keys: bool
    """Whether projections compute keys and values for each head, and attention reads them."""

    def __init__(self):
        self.names: dict[int, str] = {}
        """Dotted paths of the weights of the block, by `id`."""
        self.products: list[WeightProduct] = []
        self.mixture: WeightProduct | None = None
        """The mixture of experts, as one product without a weight."""
        self.expert_products: list[WeightProduct] = []
        """Products with the weights of all experts; each row of activations uses one expert."""
        self._seen: list[jax.Array] = []
        self._num_sums = 0

    def project(
        self, product: Product, x: jax.Array, weight: "Weight", x_axes: Axes = (),
        out_axes: Axes = (), dtype: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:  # fmt: skip
        logical_axes = axes_of(weight)
        products = self.expert_products if axes.EXPERTS in logical_axes else self.products
        record = self._product(product.equation, x, weight.shape, x_axes, logical_axes, out_axes)
        products.append(replace(record, parameter=self.names[id(weight)]))
        return super().project(product, x, weight, x_axes, out_axes, dtype)

    def constrain(self, x: jax.Array, logical_axes: Axes) -> jax.Array:
        self._num_sums += logical_axes == axes.RESIDUAL
        return x

    def mix_experts(
        self, mixture: Mixture, x_BTD: jax.Array, is_token_BT: jax.Array, router: Router,
        weights: ExpertWeights,
    ) -> MoeOutput:  # fmt: skip
        residual = axes.RESIDUAL
        self.mixture = self._product("BTD,->BTD", x_BTD, (), residual, (), residual)
        # ragged products have the weights of all experts; tiles have those of one
        mixture = replace(mixture, dispatch=Dispatch("ragged"), project=self.project)
        return mixture(x_BTD, is_token_BT, router, weights)

    def attend_by_shape(self, inputs: HeadInputs) -> jax.Array:
        """Record the heads of attention, and return zeros of the shape of its output."""
        new_entries = inputs.latents if inputs.new is None else inputs.new
        assert new_entries is not None, "a layer has new keys and values, or latents"
        *heads, dim = inputs.queries.q_BTKGH.shape
        self.head_dims = dim, new_entries[-1].shape[-1]
        self.num_kv_heads, self.makes_keys = heads[2], inputs.new is not None
        return jnp.zeros((*heads, self.head_dims[1]))

    def _product(
        self, equation: str, x: jax.Array, shape: tuple[int, ...], x_axes: Axes, weight_axes: Axes,
        out_axes: Axes,
    ) -> WeightProduct:  # fmt: skip
        # keep a reference: `id` of a freed array may be used again
        self._seen.append(x)
        labels = equation.partition("->")[0].replace(",", "")
        sizes = dict(zip(labels, (*x.shape, *shape), strict=True))
        reads, adds_to = id(x), self._num_sums
        return WeightProduct("", equation, x_axes, weight_axes, out_axes, sizes, reads, adds_to)


@cache
def record_layer(
    config: DecoderConfig, layer: int, head_shards: int, *, reads_cache: bool
) -> LayerRecord:
    """The record of a layer for whole prompts, or for calls that read the cache."""
    record = LayerRecord()

    def run() -> None:
        block = make_block(nnx.Rngs(0), config, Arrangement(head_shards), range(layer, layer + 1))
        record.names = parameter_names(block)
        x_BTD, inputs, out_BTKGH = jnp.zeros((1, 1, config.embed)), None, None
        if (options := config.layers[layer].attention) is not None:
            code = position_code(jnp.zeros((1, 1), jnp.int32), options.rope, options.rope_dim)
            inputs = block.project(x_BTD, code, record, reads_cache=reads_cache)
            out_BTKGH = record.attend_by_shape(inputs)
        block.finish(x_BTD, inputs, out_BTKGH, record, ExpertCall(jnp.ones((1, 1), bool)))

    jax.eval_shape(run)
    return record


@cache
def record_logits(config: DecoderConfig) -> WeightProduct:
    """The product of the output head; its rows B are the tokens that get logits."""
    record = LayerRecord()

    def run() -> None:
        head = Embedding(nnx.Rngs(0), config.vocab_size, config.embed, is_head=True)
        owner = "embedding" if config.tie_embeddings else "head"
        record.names = {id(head.table): f"{owner}.table"}
        head.logits(jnp.zeros((1, config.embed)), record)

    jax.eval_shape(run)
    return record.products[0]


def parameter_names(block: nnx.Module) -> dict[int, str]:
    """The dotted paths of the parameters of a block, by `id`."""
    return {
        id(node): ".".join(map(str, path))
        for path, node in nnx.iter_graph(block)
        if isinstance(node, nnx.Variable)
    }
