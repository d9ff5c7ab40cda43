"""Small parts of blocks: weights with logical axes, norms, embedding, gated MLP.

Every weight declares its logical axes next to its shape; a layout refers to these names. Knows
nothing of attention, caches or meshes.
"""

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from . import axes
from .config import DecoderConfig, TokenInputs
from .layer_config import Attention, Mlp
from .operations import Operations
from .weights.product import Product, einsum, einsum_product, gate_up_product

if TYPE_CHECKING:
    from .moe.call import ExpertCall


def gelu(x: jax.Array) -> jax.Array:
    """Exact GELU (Hendrycks, Gimpel 2016, 1606.08415) of a float32 array.

    It computes erf. jax.nn computes erfc instead, which takes twice as long on a CPU.
    """
    return x * (0.5 * (1.0 + jax.lax.erf(x * 0.5**0.5)))


ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": gelu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def weight(
    rngs: nnx.Rngs,
    shape: tuple[int, ...],
    logical_axes: tuple[str, ...],
    inputs: tuple[int, ...] = (0,),
    *,
    is_sliced_once: bool = False,
    is_matrix: bool = True,
) -> nnx.Param:
    """A random weight of variance 1 / fan-in, with its logical axes as metadata.

    `inputs` are the axes of its input features. They are adjacent, and only the first may have a
    logical axis. The metadata have them counted from the end.

    With `is_sliced_once`, a block inside a scan over layers gets the array of all layers, and takes
    layer and expert in one slice. A slice of the layer first would copy the weights of all experts.
    With `is_matrix`, a product multiplies rows with the whole weight, or with all of one index of
    its first axes: it sums over all inputs, and nothing else.
    """
    fan_in = math.prod(shape[axis] for axis in inputs)
    value = jax.random.normal(rngs.params(), shape, jnp.float32) * fan_in**-0.5
    is_matrix = is_matrix and not is_sliced_once and len(shape) > 1
    from_end = tuple(axis - len(shape) for axis in inputs)
    return nnx.Param(
        value,
        logical_axes=logical_axes,
        inputs=from_end,
        is_sliced_once=is_sliced_once,
        is_matrix=is_matrix,
    )


def is_sliced_once(path: Any, parameter: nnx.Variable) -> bool:
    """Whether a block slices a parameter itself; a filter for `nnx.split`."""
    del path
    return parameter.get_metadata().get("is_sliced_once", False)


def constant(
    value: float,
    shape: tuple[int, ...],
    logical_axes: tuple[str, ...],
    dtype: jax.typing.DTypeLike | None = None,
) -> nnx.Param:
    """A weight with a constant initial value: one for norms, zero for biases.

    If `dtype` is given, the weight is stored in it, whatever the dtype of the other weights.
    """
    initial = jnp.full(shape, value, jnp.float32)
    return nnx.Param(initial, logical_axes=logical_axes, kept_dtype=dtype)


def scale_by(x: jax.Array, factor: float) -> jax.Array:
    """`x` times a factor that is not rounded to the dtype of `x`; `x` itself for a factor of 1."""
    return x if factor == 1.0 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def merge_heads(out: jax.Array, output: jax.Array) -> jax.Array:
    """The product of heads `[B, T, ..., H]` and the output weight `[..., H, D]`."""
    # heads and their features as one axis: with three axes, XLA copies the weights in every call
    B, T = out.shape[:2]
    output_AD = output.reshape(-1, output.shape[-1])
    return einsum_product("BTA,AD->BTD", out.reshape(B, T, -1), output_AD)


class Norm(nnx.Module):
    """Norm over the last axis, in float32.

    Root mean square norm (Zhang, Sennrich 2019, 1910.07467), or layer norm (Ba et al. 2016,
    1607.06450).
    """

    def __init__(self, size: int, config: DecoderConfig):
        # not split: small, and needed on every device that has the residual stream
        self.scale = constant(1.0 - config.norm_offset, (size,), ("",))
        if config.norm_bias:
            self.bias = constant(0.0, (size,), ("",))
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        normed = self._norm(x, self.scale[...], -1)
        if not self.config.norm_bias:
            return normed.astype(x.dtype)
        bias = self.bias[...].astype(jnp.float32)
        return (normed + bias.reshape((1,) * (x.ndim - 1) + bias.shape)).astype(x.dtype)

    def _norm(self, x: jax.Array, scale: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
        """Float32 norm over `axis`; `scale` has the shape of the last axes of `x`."""
        x32 = x.astype(jnp.float32)
        if self.config.norm == "layer":
            x32 = x32 - jnp.mean(x32, axis=axis, keepdims=True)
        mean_square = jnp.mean(x32 * x32, axis=axis, keepdims=True)
        normed = x32 * jax.lax.rsqrt(mean_square + self.config.norm_epsilon)
        scale = scale.astype(jnp.float32).reshape((1,) * (x.ndim - scale.ndim) + scale.shape)
        if self.config.norm_offset:
            scale = scale + self.config.norm_offset
        return normed * scale


class HeadsNorm(Norm):
    """Norm of the heads of a projection, with a scale per head.

    Each head is normed separately, or all heads as one vector. Heads may be repeated side by side:
    as all are repeated equally often, the mean over them is the same.
    """

    def __init__(
        self, num_heads: int, config: DecoderConfig, attention: Attention, copies: int = 1
    ):
        super().__init__(num_heads * attention.head_dim, config)
        self.is_joint, self.copies = attention.qk_norm == "projection", copies

    def __call__(self, x: jax.Array) -> jax.Array:
        """Norm `[B, T, ..., H]`; the axes between T and H are the heads in order."""
        scale = self.scale[...]
        if self.copies > 1:
            scale = jnp.repeat(scale.reshape(-1, x.shape[-1]), self.copies, axis=0)
        axis = tuple(range(2, x.ndim)) if self.is_joint else -1
        return self._norm(x, scale.reshape(x.shape[2:]), axis).astype(x.dtype)


class NoNorm(nnx.Module):
    """The identity, used where a block has no norm."""

    def __call__(self, x: jax.Array) -> jax.Array:
        return x


class Embedding(nnx.Module):
    """Token table, used as embedding and, transposed, as output head.

    A table that is no head has its rows in order, as only lookups read it.
    """

    def __init__(self, rngs: nnx.Rngs, num_rows: int, embed: int, *, is_head: bool):
        shape, logical_axes = (num_rows, embed), (axes.VOCAB, "")
        self.table = weight(rngs, shape, logical_axes, inputs=(1,), is_matrix=is_head)

    def __call__(self, tokens_BT: jax.Array, operations: Operations) -> jax.Array:
        return operations.lookup(self.table, tokens_BT, axes.RESIDUAL)

    def logits(self, x_BD: jax.Array, operations: Operations) -> jax.Array:
        """Float32 `logits_BV` of final hidden states; on one device, with any leading axes."""
        product = einsum("BD,VD->BV", with_leading="...D,VD->...V")
        x_axes = (axes.RESIDUAL_BATCH, axes.EMBED)
        return operations.project(product, x_BD, self.table, x_axes, axes.LOGITS, jnp.float32)


class InputSum(nnx.Module):
    """The sum of token embeddings and the learned vectors of positions and token types, normed.

    Source: Devlin et al. 2018, "BERT" (1810.04805), section 3.
    """

    def __init__(self, rngs: nnx.Rngs, config: DecoderConfig, inputs: TokenInputs):
        # these tables are in no product, so no rule rounds them to codes
        if inputs.positions:
            self.positions = _table(rngs, inputs.positions, config.embed)
        if inputs.token_types:
            self.types = _table(rngs, inputs.token_types, config.embed)
        self.norm = Norm(config.embed, config)
        self.inputs = inputs

    def __call__(
        self, x_BTD: jax.Array, position_1T: jax.Array | np.ndarray, first_B: jax.Array
    ) -> jax.Array:
        """The normed sum; the first `first_B` tokens of a row have type 0, the others type 1."""
        inputs, dtype = self.inputs, x_BTD.dtype
        if inputs.token_types:
            types_1D = self.types[...].astype(dtype)[:, None, None]
            is_second_BT1 = (position_1T >= first_B[:, None])[..., None]
            last = min(1, inputs.token_types - 1)
            x_BTD = x_BTD + jnp.where(is_second_BT1, types_1D[last], types_1D[0])
        if inputs.positions:
            # positions of padding may be past the end; their states are not read
            index_1T = jnp.minimum(position_1T + inputs.first_position, inputs.positions - 1)
            x_BTD = x_BTD + self.positions[...].astype(dtype)[index_1T]
        return self.norm(x_BTD)


def _table(rngs: nnx.Rngs, num_rows: int, embed: int) -> nnx.Param:
    value = jax.random.normal(rngs.params(), (num_rows, embed), jnp.float32) * embed**-0.5
    return nnx.Param(value, logical_axes=("", ""))


class DenseMlp(nnx.Module):
    """MLP without a gate, `down(act(up(x)))`, or with one, `down(act(gate(x)) * up(x))`.

    Gate and up are one product. Source: Shazeer 2020, "GLU Variants Improve Transformer"
    (2002.05202).
    """

    def __init__(self, rngs: nnx.Rngs, embed: int, options: Mlp):
        F, has_bias = options.size, options.has_bias
        if options.is_gated:
            self.gate_up = weight(rngs, (2, embed, F), ("", axes.EMBED_IN, axes.MLP), inputs=(1,))
        else:
            self.up = weight(rngs, (embed, F), (axes.EMBED_IN, axes.MLP))
        self.down = weight(rngs, (F, embed), (axes.MLP, axes.EMBED_IN))
        if has_bias and options.is_gated:
            self.gate_up_bias = constant(0.0, (2, F), ("", axes.MLP))
        elif has_bias:
            self.up_bias = constant(0.0, (F,), (axes.MLP,))
        if has_bias:
            self.down_bias = constant(0.0, (embed,), ("",))
        self.options = options

    def __call__(
        self, x_BTD: jax.Array, operations: Operations, experts: "ExpertCall | None" = None
    ) -> jax.Array:
        del experts  # only `SparseMlp`, which has the same signature, uses it
        hidden = self._gated if self.options.is_gated else self._plain
        h_BTF, down = hidden(x_BTD, operations).astype(x_BTD.dtype), einsum("BTF,FD->BTD")
        out_BTD = operations.project(down, h_BTF, self.down, axes.HIDDEN, axes.RESIDUAL)
        if self.options.has_bias:
            out_BTD = out_BTD + self.down_bias[...][None, None]
        return out_BTD

    def _plain(self, x_BTD: jax.Array, operations: Operations) -> jax.Array:
        up = einsum("BTD,DF->BTF")
        h_BTF = operations.project(up, x_BTD, self.up, axes.RESIDUAL, axes.HIDDEN)
        if self.options.has_bias:
            h_BTF = h_BTF + self.up_bias[...][None, None]
        return ACTIVATIONS[self.options.activation](h_BTF.astype(jnp.float32))

    def _gated(self, x_BTD: jax.Array, operations: Operations) -> jax.Array:
        gate_up, out_axes = Product("BTD,PDF->PBTF", gate_up_product), ("", *axes.HIDDEN)
        h_PBTF = operations.project(gate_up, x_BTD, self.gate_up, axes.RESIDUAL, out_axes)
        if self.options.has_bias:
            h_PBTF = h_PBTF + self.gate_up_bias[...][:, None, None]
        # in float32: in bfloat16 every step of the activation would be rounded. One by one: XLA for
        # TPU would write both to memory in float32 if they were converted together
        gate_BTF, up_BTF = (x.astype(jnp.float32) for x in h_PBTF)
        return ACTIVATIONS[self.options.activation](gate_BTF) * up_BTF
