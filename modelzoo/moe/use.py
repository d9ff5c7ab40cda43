"""What a call made of its experts: load, rows of products, choices dropped. Counts alone."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .dispatch import load


class ExpertUse(NamedTuple):
    """Of one sparse layer, by shard of the tokens (S); or of all layers, along a first axis."""

    load_SE: jax.Array
    """Choices of each expert."""
    rows_SE: jax.Array
    """Rows that each expert's products ran over, padding among them."""
    dropped_SE: jax.Array


class ExpertReport(NamedTuple):
    """What sparse layers report of a call."""

    use: ExpertUse
    """Of each sparse layer, along a first axis."""
    num_dropped_B: jax.Array
    """Choices dropped of each row's tokens, in all layers."""


def count_use(
    expert_MZ: jax.Array, rows_E: jax.Array, dropped_MZ: jax.Array, num_experts: int
) -> ExpertUse:
    """Count one shard's choices; `dropped_MZ` says which of them have no row."""
    load_E = load(expert_MZ, num_experts)
    dropped_E = load(jnp.where(dropped_MZ, expert_MZ, num_experts), num_experts)
    return ExpertUse(load_E[None], rows_E[None], dropped_E[None])


def rows_of_tiles(load_E: jax.Array, tile: int) -> jax.Array:
    """Rows of the whole tiles that hold a load."""
    return (load_E + tile - 1) // tile * tile
