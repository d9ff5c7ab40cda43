"""Gated MLPs of experts over rows in order of experts, in tiles or as ragged products.

Loops run over experts, pieces of the hidden size and the tiles that hold tokens. So work is
proportional to the load, while shapes are static. Weights are either read in pieces that stay in
the cache of the processor for all tiles of the expert, or read from memory by the product of each
tile. A tile gathers its tokens and adds its outputs to their sums, so no array needs rows for the
maximum load. All products of a graph have the same shape, and a sum over experts is in order of
experts, so the bits of a token depend neither on its row nor on other tokens.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp

from .. import axes
from ..weights.product import Product, einsum, gate_up_product
from ..weights.quantised_weight import QuantisedWeight, slice_weight
from ..weights.weight_products import Axes, Project
from .dispatch import ExpertRows

if TYPE_CHECKING:
    from ..weights.weight_products import Weight

GatedUnit = Callable[[jax.Array, jax.Array], jax.Array]
"""A function from the outputs of gate and up to the hidden activations."""

READ_BOUND = 2**30
"""An upper bound on the number of times that a call reads the weights of one expert."""

GATE_UP_AXES = (axes.EXPERTS, "", "", axes.EXPERT_MLP)
DOWN_AXES = (axes.EXPERTS, axes.EXPERT_MLP, "")
GATE_UP_BIAS_AXES = (axes.EXPERTS, "", axes.EXPERT_MLP)
DOWN_BIAS_AXES = (axes.EXPERTS, "")


class ExpertWeights(NamedTuple):
    """Weights of the experts on this device."""

    gate_up_EPDF: "Weight"
    down_EFD: "Weight"
    gate_up_bias_EPF: jax.Array | None = None
    down_bias_ED: jax.Array | None = None
    layer: jax.Array | None = None
    """The layer to use, if the first axis of `gate_up` and `down` is layers."""

    @property
    def num_experts(self) -> int:
        """The number of experts on this device."""
        return self.down_EFD.shape[-3]

    @property
    def axes(self) -> tuple[Axes, ...]:
        """The logical axes of every field."""
        layers = () if self.layer is None else ("",)
        products = (*layers, *GATE_UP_AXES), (*layers, *DOWN_AXES)
        return (*products, GATE_UP_BIAS_AXES, DOWN_BIAS_AXES, ())

    def select_layer(self) -> "ExpertWeights":
        """The weights of only the layer to use."""
        if self.layer is None:
            return self
        select = partial(jax.lax.dynamic_index_in_dim, index=self.layer, keepdims=False)
        gate_up, down = (jax.tree.map(select, x[...]) for x in (self.gate_up_EPDF, self.down_EFD))
        return self._replace(gate_up_EPDF=gate_up, down_EFD=down, layer=None)

    def dequantise(self) -> "ExpertWeights":
        """The same weights as arrays, if they are quantised."""
        gate_up, down = (
            x.dequantise() if isinstance(x, QuantisedWeight) else x
            for x in (self.gate_up_EPDF, self.down_EFD)
        )
        return self._replace(gate_up_EPDF=gate_up, down_EFD=down)


@dataclass(frozen=True)
class Tiling:
    """Sizes of expert products, and the placement of routing weights."""

    tile: int
    """The rows of a product."""
    piece_bytes: int | None
    """See `Tiles`."""
    weighs_input: bool = False
    """Whether routing weights multiply the inputs of experts instead of their outputs."""


def run_tiles(
    x_MD: jax.Array,
    rows: ExpertRows,
    weights: ExpertWeights,
    unit: GatedUnit,
    tiling: Tiling,
    project: Project,
) -> jax.Array:
    """Run the experts in tiles, and sum the rows of each token in order of experts.

    Returns:
      `out_MD` in float32.
    """
    M, F, tile = len(x_MD), weights.down_EFD.shape[-2], tiling.tile
    piece = _piece(weights, tiling.piece_bytes)
    num_pieces = F // piece
    # padded, as a slice that ends past the last row would be moved to an earlier start
    token_U, weight_U = (jnp.pad(x_U, (0, tile)) for x_U in (rows.token_U, rows.weight_U))
    index_W = jnp.arange(tile, dtype=jnp.int32)

    def expert_piece(i: jax.Array, out_MD: jax.Array) -> jax.Array:
        e, p = i // num_pieces, i % num_pieces
        num_tiles = (rows.load_E[e] + tile - 1) // tile

        def run_tile(piece_weights: ExpertWeights, t: jax.Array, out_MD: jax.Array) -> jax.Array:
            first = rows.first_E[e] + t * tile
            token_W = jax.lax.dynamic_slice_in_dim(token_U, first, tile)
            weight_W1 = jax.lax.dynamic_slice_in_dim(weight_U, first, tile)[:, None]
            is_row_W = t * tile + index_W < rows.load_E[e]
            # different indices past the end, as the scatter requires unique ones
            token_W = jnp.where(is_row_W, token_W, M + index_W)
            x_WD = x_MD.at[token_W].get(mode="clip")
            if tiling.weighs_input:
                x_WD = (x_WD * weight_W1).astype(x_WD.dtype)
            y_WD = _run_expert(x_WD, piece_weights, unit, project)
            if weights.down_bias_ED is not None:
                # only for one piece of the hidden size
                y_WD = y_WD + jnp.where(p == 0, weights.down_bias_ED[e], 0)[None]
            if not tiling.weighs_input:
                y_WD = y_WD * weight_W1
            return out_MD.at[token_W].add(y_WD, mode="drop", unique_indices=True)

        def read(r: jax.Array, out_MD: jax.Array) -> jax.Array:
            # r // READ_BOUND is 0, but XLA does not know it: the slice depends on the loop, so XLA
            # does not move it out, where it would also read experts without tokens
            piece_weights = _cut(weights, e + r // READ_BOUND, p * piece, piece)
            if tiling.piece_bytes is None:
                return run_tile(piece_weights, r, out_MD)
            return jax.lax.fori_loop(0, num_tiles, partial(run_tile, piece_weights), out_MD)

        num_reads = num_tiles if tiling.piece_bytes is None else jnp.minimum(num_tiles, 1)
        return jax.lax.fori_loop(0, num_reads, read, out_MD)

    zeros_MD = jnp.zeros(x_MD.shape, jnp.float32)
    return jax.lax.fori_loop(0, weights.num_experts * num_pieces, expert_piece, zeros_MD)


def run_ragged(
    x_UD: jax.Array, load_E: jax.Array, weights: ExpertWeights, unit: GatedUnit, project: Project
) -> jax.Array:
    """Float32 outputs `y_UD` of rows without gaps, by `jax.lax.ragged_dot`: the reference."""
    # an equation does not say which expert's scales belong to a row
    weights = weights.select_layer().dequantise()

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, weight, load_E, preferred_element_type=jnp.float32)

    def gate_up(x_UD: jax.Array, gate_up_EPDF: jax.Array) -> jax.Array:
        return jnp.stack([product(x_UD, gate_up_EPDF[:, side]) for side in (0, 1)])

    def bias(bias_E: jax.Array) -> jax.Array:
        return jnp.repeat(bias_E, load_E, axis=0, total_repeat_length=x_UD.shape[0])

    both = Product("UD,EPDF->PUF", gate_up)
    gate, up = project(both, x_UD, weights.gate_up_EPDF, dtype=jnp.float32)
    if weights.gate_up_bias_EPF is not None:
        gate = gate + bias(weights.gate_up_bias_EPF[:, 0])
        up = up + bias(weights.gate_up_bias_EPF[:, 1])
    h_UF = unit(gate, up).astype(x_UD.dtype)
    y_UD = project(Product("UF,EFD->UD", product), h_UF, weights.down_EFD, dtype=jnp.float32)
    return y_UD if weights.down_bias_ED is None else y_UD + bias(weights.down_bias_ED)


def hidden(
    x_WD: jax.Array,
    gate_up_PDF: "Weight",
    bias_PF: jax.Array | None,
    unit: GatedUnit,
    project: Project,
) -> jax.Array:
    """The hidden activations of rows in one expert, or in a piece of its hidden size."""
    product = Product("WD,PDF->PWF", gate_up_product)
    h_PWF = project(product, x_WD, gate_up_PDF, dtype=jnp.float32)
    if bias_PF is not None:
        h_PWF = h_PWF + bias_PF[:, None]
    return unit(h_PWF[0], h_PWF[1]).astype(x_WD.dtype)


def _run_expert(
    x_WD: jax.Array, weights: ExpertWeights, unit: GatedUnit, project: Project
) -> jax.Array:
    """Run the rows of a tile through one expert, or through a piece of its hidden size."""
    bias_EPF = weights.gate_up_bias_EPF
    bias_PF = None if bias_EPF is None else bias_EPF[0]
    h_WF = hidden(x_WD, weights.gate_up_EPDF[0], bias_PF, unit, project)
    return project(einsum("WF,FD->WD"), h_WF, weights.down_EFD[0], dtype=jnp.float32)


def _cut(weights: ExpertWeights, e: jax.Array, start: jax.Array, size: int) -> ExpertWeights:
    """The weights of a piece of the hidden size of expert `e`, without the bias of `down`."""
    layer = () if weights.layer is None else (weights.layer,)

    def cut(x: "Weight", axis: int, outer: tuple[jax.Array, ...] = ()) -> Any:
        # one slice: with separate slices of layer and expert, XLA copies all experts of the layer
        starts = [*outer, e, *[0] * (x.ndim - len(outer) - 1)]
        sizes = [1] * len(outer) + [1, *x.shape[len(outer) + 1 :]]
        starts[axis], sizes[axis] = start, size
        part = slice_weight(x[...], starts, sizes)
        if isinstance(part, QuantisedWeight):
            # pieces of the hidden size would have scales of their own, which differ between layouts
            part = replace(part, quantisation=replace(part.quantisation, rounds_activations=False))
        return jax.tree.map(lambda array: array.reshape(array.shape[len(outer) :]), part)

    bias_EPF = weights.gate_up_bias_EPF
    return ExpertWeights(
        cut(weights.gate_up_EPDF, -1, layer),
        cut(weights.down_EFD, -2, layer),
        None if bias_EPF is None else cut(bias_EPF, -1),
    )


def _piece(weights: ExpertWeights, piece_bytes: int | None) -> int:
    """The size of a piece: the largest divisor of F whose gate and up weights fit `piece_bytes`.

    It is a multiple of `axes.LANES` if F is, and of the groups of `down` if it is quantised in
    groups. Codes count as what they are converted to.
    """
    gate_up_EPDF, down_EFD = weights.gate_up_EPDF[...], weights.down_EFD[...]
    *_, P, D, F = gate_up_EPDF.shape
    if piece_bytes is None:
        return F
    unit = axes.LANES if F % axes.LANES == 0 else 1
    if isinstance(down_EFD, QuantisedWeight):
        unit = math.lcm(unit, down_EFD.quantisation.format.group or 1)
    is_coded = isinstance(gate_up_EPDF, QuantisedWeight)
    dtype = gate_up_EPDF.value_dtype if is_coded else gate_up_EPDF.dtype
    max_size = piece_bytes // (P * D * dtype.itemsize)
    return max(d for d in range(unit, F + 1, unit) if F % d == 0 and (d == unit or d <= max_size))
