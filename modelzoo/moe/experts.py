"""The experts' gated MLPs over rows in order of experts: tile by tile, or as ragged products.

The loops run over experts, pieces of the hidden size and the tiles that hold tokens, so work
follows the load while shapes stay static; each weight is read once, in pieces that stay in a cache
while the tiles of the expert pass. Every product of a graph has the same shape, so a row's bits
depend neither on its place nor on other rows.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from .. import axes
from ..operations import Project, einsum, gate_up_product
from .dispatch import Tiles

if TYPE_CHECKING:
    from ..operations import Weight

GatedUnit = Callable[[jax.Array, jax.Array], jax.Array]
"""The hidden activations from those of gate and up."""

PIECE_BYTES = 4 * 2**20
"""Of gate and up together; half and twice as much are equally fast on a CPU with 2 MiB of L2."""


class ExpertWeights(NamedTuple):
    """Weights of the experts on this device."""

    gate_up_EPDF: "Weight"
    down_EFD: "Weight"
    gate_up_bias_EPF: jax.Array | None = None
    down_bias_ED: jax.Array | None = None


GATE_UP_AXES = (axes.EXPERTS, "", "", axes.EXPERT_MLP)
DOWN_AXES = (axes.EXPERTS, axes.EXPERT_MLP, "")
GATE_UP_BIAS_AXES = (axes.EXPERTS, "", axes.EXPERT_MLP)
DOWN_BIAS_AXES = (axes.EXPERTS, "")
WEIGHT_AXES = (GATE_UP_AXES, DOWN_AXES, GATE_UP_BIAS_AXES, DOWN_BIAS_AXES)
"""Logical axes of `ExpertWeights`, in their order."""


def run_tiles(
    x_UD: jax.Array,
    tiles: Tiles,
    weights: ExpertWeights,
    unit: GatedUnit,
    tile: int,
    project: Project,
) -> jax.Array:
    """Float32 outputs `y_UD` of rows in whole tiles; tiles without a token stay zero."""
    E, F, D = weights.down_EFD.shape
    piece = _piece(weights.gate_up_EPDF)

    def expert(e: jax.Array, y_UD: jax.Array) -> jax.Array:
        def one_piece(p: jax.Array, y_UD: jax.Array) -> jax.Array:
            of_piece = _cut(weights, e, p * piece, piece)
            down_bias_D = None if weights.down_bias_ED is None else weights.down_bias_ED[e]

            def one_tile(t: jax.Array, y_UD: jax.Array) -> jax.Array:
                row = tiles.first_row_E[e] + t * tile
                x_WD = jax.lax.dynamic_slice_in_dim(x_UD, row, tile)
                old_WD = jax.lax.dynamic_slice_in_dim(y_UD, row, tile)
                y_WD = old_WD + _hidden(x_WD, of_piece, unit, project)
                if down_bias_D is not None:
                    # once for all pieces of the hidden size
                    y_WD = y_WD + jnp.where(p == 0, down_bias_D, 0)[None]
                return jax.lax.dynamic_update_slice_in_dim(y_UD, y_WD, row, axis=0)

            return jax.lax.fori_loop(0, tiles.num_tiles_E[e], one_tile, y_UD)

        return jax.lax.fori_loop(0, F // piece, one_piece, y_UD)

    return jax.lax.fori_loop(0, E, expert, jnp.zeros((x_UD.shape[0], D), jnp.float32))


def run_ragged(
    x_UD: jax.Array, load_E: jax.Array, weights: ExpertWeights, unit: GatedUnit, project: Project
) -> jax.Array:
    """Float32 outputs `y_UD` of rows without gaps, through `jax.lax.ragged_dot`; the reference."""

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        return jax.lax.ragged_dot(x, weight, load_E, preferred_element_type=jnp.float32)

    def gate_up(x_UD: jax.Array, gate_up_EPDF: jax.Array) -> jax.Array:
        return jnp.stack([product(x_UD, gate_up_EPDF[:, side]) for side in (0, 1)])

    def bias(of_experts: jax.Array) -> jax.Array:
        return jnp.repeat(of_experts, load_E, axis=0, total_repeat_length=x_UD.shape[0])

    gate, up = project("UD,EPDF->PUF", gate_up, x_UD, weights.gate_up_EPDF)
    if weights.gate_up_bias_EPF is not None:
        gate = gate + bias(weights.gate_up_bias_EPF[:, 0])
        up = up + bias(weights.gate_up_bias_EPF[:, 1])
    y_UD = project("UF,EFD->UD", product, unit(gate, up).astype(x_UD.dtype), weights.down_EFD)
    return y_UD if weights.down_bias_ED is None else y_UD + bias(weights.down_bias_ED)


def _hidden(
    x_WD: jax.Array, weights: ExpertWeights, unit: GatedUnit, project: Project
) -> jax.Array:
    """Rows of one tile through one expert, or through a piece of its hidden size."""
    gate_up = partial(gate_up_product, dtype=jnp.float32)
    h_PWF = project("WD,PDF->PWF", gate_up, x_WD, weights.gate_up_EPDF[0])
    if weights.gate_up_bias_EPF is not None:
        h_PWF = h_PWF + weights.gate_up_bias_EPF[0][:, None]
    h_WF = unit(h_PWF[0], h_PWF[1]).astype(x_WD.dtype)
    return project(*einsum("WF,FD->WD", jnp.float32), h_WF, weights.down_EFD[0])


def _cut(weights: ExpertWeights, e: jax.Array, start: jax.Array, size: int) -> ExpertWeights:
    """One expert, and a piece of its hidden size; without the last bias, which has no pieces."""

    def cut(x: "Weight", axis: int) -> jax.Array:
        one = jax.lax.dynamic_slice_in_dim(x[...], e, 1)
        return jax.lax.dynamic_slice_in_dim(one, start, size, axis=axis)

    bias_EPF = weights.gate_up_bias_EPF
    return ExpertWeights(
        cut(weights.gate_up_EPDF, 3),
        cut(weights.down_EFD, 1),
        None if bias_EPF is None else cut(bias_EPF, 2),
    )


def _piece(gate_up_EPDF: "Weight") -> int:
    """The largest divisor of F of which gate and up fit into `PIECE_BYTES`."""
    _, P, D, F = gate_up_EPDF.shape
    most = PIECE_BYTES // (P * D * gate_up_EPDF.dtype.itemsize)
    return max(d for d in range(1, F + 1) if F % d == 0 and (d == 1 or d <= most))
