"""The mixture of experts of a sparse layer: dispatch, expert products and combine, on one device.

`ExpertShards` tells which experts are on the device, and exchanges rows between devices; `sharding`
makes it from a mesh. Knows nothing of meshes.

Source of dispatch with a fixed capacity: Lepikhin et al. 2020, "GShard", 2006.16668, algorithm 1.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..moe_config import Dispatch, Routing
from ..weights.weight_products import Project, multiply
from .call import ExpertUse, rows_of_tiles
from .dispatch import (
    RowAssignment,
    assign_capacity_rows,
    assign_ragged_rows,
    load,
    received_rows,
    sort_choices,
)
from .experts import ExpertWeights, GatedUnit, Tiling, run_ragged, run_tiles
from .routing import Choices, Router, route


@dataclass(frozen=True)
class ExpertShards:
    """The experts on this device, and the exchange of rows with devices that have other experts.

    If tokens are split over the devices that experts are split over, tokens are exchanged. If these
    devices all have the same tokens, each computes the sum over its own experts, and the caller
    adds the sums.
    """

    first: jax.Array | int = 0
    """The first expert on this device."""
    num_exchanging: int = 1
    """The number of devices that exchange tokens, in order of their experts."""
    exchange: Callable[[jax.Array], jax.Array] = lambda x: x
    """All-to-all over the first axis: sends slice j to device j. It is its own inverse."""


ALL_EXPERTS = ExpertShards()


class MoeOutput(NamedTuple):
    """The output of a mixture of experts."""

    out_BTD: jax.Array
    num_dropped_BT: jax.Array
    use: ExpertUse


@dataclass(frozen=True)
class Mixture:
    """The mixture of one layer as a function of arrays."""

    routing: Routing
    dispatch: Dispatch
    unit: GatedUnit
    project: Project = multiply

    def __call__(
        self,
        x_BTD: jax.Array,
        is_token_BT: jax.Array,
        router: Router,
        weights: ExpertWeights,
        shards: ExpertShards = ALL_EXPERTS,
    ) -> MoeOutput:
        B, T, D = x_BTD.shape
        x_MD = x_BTD.reshape(B * T, D)
        choices = route(x_BTD, is_token_BT, router, self.routing, self.project)
        mix = self._with_capacity if self.dispatch.kind == "capacity" else self._lossless
        out_MD, is_dropped_MZ, rows_E = mix(x_MD, choices, weights, shards)
        num_experts = self.routing.num_experts
        load_E = load(choices.expert_MZ, num_experts)
        dropped_MZ = jnp.where(is_dropped_MZ, choices.expert_MZ, num_experts)
        use = ExpertUse(load_E[None], rows_E[None], load(dropped_MZ, num_experts)[None])
        num_dropped_BT = is_dropped_MZ.sum(axis=-1, dtype=jnp.int32).reshape(B, T)
        return MoeOutput(out_MD.astype(x_BTD.dtype).reshape(B, T, D), num_dropped_BT, use)

    def _lossless(
        self, x_MD: jax.Array, choices: Choices, weights: ExpertWeights, shards: ExpertShards
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Run all choices: every token goes to every device that exchanges tokens.

        Each device computes the weighted sum over its own experts, so one row per token comes back.
        """
        M, D = x_MD.shape
        n, E = shards.num_exchanging, self.routing.num_experts
        is_dropped_MZ = jnp.zeros(choices.expert_MZ.shape, bool)
        if n > 1:
            x_MD, choices = _exchange_tokens(x_MD, choices, shards)
        local = _local(choices, weights, shards)
        tile = 1 if self.dispatch.kind == "ragged" else self.dispatch.tile(local.expert_MZ.size, E)
        out_MD = self._run(x_MD, local, weights, tile)
        rows_E = rows_of_tiles(load(choices.expert_MZ, E), tile)
        if n == 1:
            return out_MD, is_dropped_MZ, rows_E
        local_E = jnp.arange(E) - shards.first
        rows_E = jnp.where((local_E >= 0) & (local_E < weights.num_experts), rows_E, 0)
        parts = shards.exchange(out_MD.reshape(n, M, D).astype(x_MD.dtype))
        return _sum_in_order(parts), is_dropped_MZ, rows_E

    def _with_capacity(
        self, x_MD: jax.Array, choices: Choices, weights: ExpertWeights, shards: ExpertShards
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Run the choices within capacity; the tokens of each device have rows of their own."""
        n, E, (M, D) = shards.num_exchanging, self.routing.num_experts, x_MD.shape
        num_local = weights.num_experts
        tile = self.dispatch.tile(choices.expert_MZ.size, E)
        capacity = self.dispatch.capacity(M, self.routing.num_chosen, E)
        assignment = assign_capacity_rows(choices.expert_MZ, E, capacity)
        is_token_MZ = choices.expert_MZ < E
        is_dropped_MZ = is_token_MZ & (assignment.row_MZ == E * capacity)
        if n == 1:
            kept_MZ = jnp.where(is_dropped_MZ, E, choices.expert_MZ)
            local = _local(choices._replace(expert_MZ=kept_MZ), weights, shards)
            out_MD = self._run(x_MD, local, weights, tile)
            return out_MD, is_dropped_MZ, rows_of_tiles(load(kept_MZ, E), tile)
        x_UD = self._rows(x_MD, assignment, choices)
        x_SECD = shards.exchange(x_UD.reshape(n, num_local, capacity, D))
        x_UD = x_SECD.swapaxes(0, 1).reshape(-1, D)
        rows = received_rows(num_local, n * capacity)
        tiling = Tiling(tile, self.dispatch.tiles.piece_bytes)
        y_UD = run_tiles(x_UD, rows, weights, self.unit, tiling, self.project)
        y_SECD = y_UD.reshape(num_local, n, capacity, D).swapaxes(0, 1).astype(x_MD.dtype)
        y_UD = shards.exchange(y_SECD).reshape(-1, D)
        rows_E = jnp.full(E, capacity, jnp.int32)
        return self._combine(y_UD, assignment, choices.weight_MZ), is_dropped_MZ, rows_E

    def _run(
        self, x_MD: jax.Array, choices: Choices, weights: ExpertWeights, tile: int
    ) -> jax.Array:
        """The weighted sum of each token over its experts on this device: `out_MD` in float32."""
        E = weights.num_experts
        if self.dispatch.kind != "ragged":
            tiling = Tiling(tile, self.dispatch.tiles.piece_bytes, self.routing.weighs_input)
            rows = sort_choices(choices, E)
            return run_tiles(x_MD, rows, weights, self.unit, tiling, self.project)
        assignment = assign_ragged_rows(choices.expert_MZ, E)
        x_UD, load_E = self._rows(x_MD, assignment, choices), load(choices.expert_MZ, E)
        y_UD = run_ragged(x_UD, load_E, weights, self.unit, self.project)
        return self._combine(y_UD, assignment, choices.weight_MZ)

    def _rows(self, x_MD: jax.Array, assignment: RowAssignment, choices: Choices) -> jax.Array:
        """The tokens of rows, with zeros for empty rows."""
        x_UD = x_MD.at[assignment.token_U].get(mode="fill", fill_value=0)
        if not self.routing.weighs_input:
            return x_UD
        weight_U = jnp.zeros(assignment.token_U.shape, jnp.float32)
        weight_U = weight_U.at[assignment.row_MZ].set(choices.weight_MZ, mode="drop")
        return (x_UD * weight_U[:, None]).astype(x_MD.dtype)

    def _combine(
        self, y_UD: jax.Array, assignment: RowAssignment, weight_MZ: jax.Array
    ) -> jax.Array:
        """The weighted sum of each token over its experts, best first: `out_MD` in float32."""
        M, D = assignment.row_MZ.shape[0], y_UD.shape[1]
        out_MD = jnp.zeros((M, D), jnp.float32)
        for i in range(self.routing.num_chosen):
            y_MD = y_UD.at[assignment.row_MZ[:, i]].get(mode="fill", fill_value=0)
            y_MD = y_MD.astype(jnp.float32)
            out_MD += y_MD if self.routing.weighs_input else weight_MZ[:, i, None] * y_MD
        return out_MD


def _local(choices: Choices, weights: ExpertWeights, shards: ExpertShards) -> Choices:
    """Choices by local expert number; the choice of an expert on another device is no expert."""
    local_MZ = choices.expert_MZ - shards.first
    is_here_MZ = (local_MZ >= 0) & (local_MZ < weights.num_experts)
    return choices._replace(expert_MZ=jnp.where(is_here_MZ, local_MZ, weights.num_experts))


def _exchange_tokens(
    x_MD: jax.Array, choices: Choices, shards: ExpertShards
) -> tuple[jax.Array, Choices]:
    """Gather the tokens of all devices and their choices in one message.

    The message is integers of the width of `x_MD`, so that a transfer cannot change any bit.
    """
    word = jnp.uint32 if x_MD.dtype.itemsize == 4 else jnp.uint16
    M, D = x_MD.shape
    pieces = [jax.lax.bitcast_convert_type(x_MD, word), choices.expert_MZ.astype(word)]
    pieces.append(jax.lax.bitcast_convert_type(choices.weight_MZ, word).reshape(M, -1))
    packed = jnp.concatenate(pieces, axis=1)
    packed = jnp.broadcast_to(packed[None], (shards.num_exchanging, *packed.shape))
    packed = shards.exchange(packed).reshape(-1, packed.shape[-1])
    Z = choices.expert_MZ.shape[1]
    weight = packed[:, D + Z :]
    if word == jnp.uint16:
        weight = weight.reshape(-1, Z, 2)
    return jax.lax.bitcast_convert_type(packed[:, :D], x_MD.dtype), Choices(
        packed[:, D : D + Z].astype(jnp.int32),
        jax.lax.bitcast_convert_type(weight, jnp.float32),
    )


def _sum_in_order(parts: jax.Array) -> jax.Array:
    total = parts[0].astype(jnp.float32)
    for part in parts[1:]:
        total = total + part.astype(jnp.float32)
    return total
