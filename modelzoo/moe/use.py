"""Counts of the use of experts in a call: load, rows of products and dropped choices."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .dispatch import load


class ExpertUse(NamedTuple):
    """The use of experts in one sparse layer, by shard of the tokens (S).

    For several layers, the first axis of each array is layers.
    """

    load_SE: jax.Array
    """The number of choices of each expert."""
    rows_SE: jax.Array
    """The number of rows in the products of each expert, padding included."""
    dropped_SE: jax.Array
    """The number of dropped choices of each expert."""


class ExpertReport(NamedTuple):
    """The report of all sparse layers of a call."""

    use: ExpertUse
    """The use of experts, with layers as first axis."""
    num_dropped_B: jax.Array
    """The number of dropped choices of the tokens of each row, in all layers."""


def count_use(
    expert_MZ: jax.Array, rows_E: jax.Array, dropped_MZ: jax.Array, num_experts: int
) -> ExpertUse:
    """Count the choices of one shard; `dropped_MZ` is true for a choice without a row."""
    load_E = load(expert_MZ, num_experts)
    dropped_E = load(jnp.where(dropped_MZ, expert_MZ, num_experts), num_experts)
    return ExpertUse(load_E[None], rows_E[None], dropped_E[None])


def rows_of_tiles(load_E: jax.Array, tile: int) -> jax.Array:
    """The rows of the whole tiles that a load needs."""
    return (load_E + tile - 1) // tile * tile
