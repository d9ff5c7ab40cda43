"""Rows for choices: in order of experts, in arrays of static size.

Every place follows from counts, so it depends on no order of execution. Guarantees: of two choices
of one expert, the one of the earlier token has the earlier row; what is no token takes no row.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Tiles(NamedTuple):
    """The rows of each expert: some whole tiles, one after another."""

    first_row_E: jax.Array
    num_tiles_E: jax.Array
    """Tiles that may have a token in them; they are the expert's first."""


class Places(NamedTuple):
    """Where choices went: U rows, of which each expert has some whole tiles."""

    row_MZ: jax.Array
    """Row of each choice; U for one that has none."""
    token_U: jax.Array
    """Token of each row; M for an empty one."""
    tiles: Tiles


def lossless_places(expert_MZ: jax.Array, num_experts: int, tile: int) -> Places:
    """A row for every choice, experts one after another, each from the start of a tile."""
    M, Z = expert_MZ.shape
    num_rows = M * min(Z, num_experts) + num_experts * (tile - 1)
    num_rows = num_rows // tile * tile
    rank_MZ, load_E = _ranks(expert_MZ, num_experts)
    num_tiles_E = (load_E + tile - 1) // tile
    first_row_E = (jnp.cumsum(num_tiles_E) - num_tiles_E) * tile
    row_MZ = first_row_E.at[expert_MZ].get(mode="fill", fill_value=num_rows) + rank_MZ
    row_MZ = jnp.minimum(row_MZ, num_rows)
    return Places(row_MZ, _tokens(row_MZ, num_rows), Tiles(first_row_E, num_tiles_E))


def capacity_places(expert_MZ: jax.Array, num_experts: int, capacity: int, tile: int) -> Places:
    """The same number of rows for every expert; choices beyond them have none."""
    num_rows = num_experts * capacity
    rank_MZ, load_E = _ranks(expert_MZ, num_experts)
    has_row_MZ = (rank_MZ < capacity) & (expert_MZ < num_experts)
    row_MZ = jnp.where(has_row_MZ, expert_MZ * capacity + rank_MZ, num_rows)
    num_tiles_E = (jnp.minimum(load_E, capacity) + tile - 1) // tile
    first_row_E = jnp.arange(num_experts, dtype=jnp.int32) * capacity
    return Places(row_MZ, _tokens(row_MZ, num_rows), Tiles(first_row_E, num_tiles_E))


def all_tiles(num_experts: int, capacity: int, tile: int) -> Tiles:
    """Rows that others filled, so that any of them may have a token."""
    first_row_E = jnp.arange(num_experts, dtype=jnp.int32) * capacity
    return Tiles(first_row_E, jnp.full(num_experts, capacity // tile, jnp.int32))


def load(expert_MZ: jax.Array, num_experts: int) -> jax.Array:
    """Choices of each expert: `load_E`."""
    return jnp.bincount(expert_MZ.reshape(-1), length=num_experts + 1)[:-1].astype(jnp.int32)


def _ranks(expert_MZ: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """How many earlier choices took the same expert, and how many took each in all."""
    choice = expert_MZ.reshape(-1)
    order = jnp.argsort(choice, stable=True)
    load_E = load(expert_MZ, num_experts)
    first_E = jnp.cumsum(load_E) - load_E
    rank_sorted = jnp.arange(choice.size, dtype=jnp.int32) - first_E.at[choice[order]].get(
        mode="fill", fill_value=0
    )
    rank = jnp.zeros_like(rank_sorted).at[order].set(rank_sorted, unique_indices=True)
    return rank.reshape(expert_MZ.shape), load_E


def _tokens(row_MZ: jax.Array, num_rows: int) -> jax.Array:
    M, Z = row_MZ.shape
    token_MZ = jnp.broadcast_to(jnp.arange(M, dtype=jnp.int32)[:, None], (M, Z))
    empty_U = jnp.full(num_rows, M, jnp.int32)
    return empty_U.at[row_MZ.reshape(-1)].set(token_MZ.reshape(-1), mode="drop")
