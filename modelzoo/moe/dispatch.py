"""Assignment of choices to rows in order of experts, in arrays of static size.

Rows are computed from counts, so they do not depend on the order of execution. Guarantees: the
choices of one expert are in order of tokens; padding gets no row of an expert.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from .routing import Choices


class ExpertRows(NamedTuple):
    """Rows in order of experts, without gaps."""

    token_U: jax.Array
    """The token of each row."""
    weight_U: jax.Array
    """The weight of the expert of a row for its token."""
    first_E: jax.Array
    """The first row of each expert."""
    load_E: jax.Array
    """The number of rows of each expert."""


class RowAssignment(NamedTuple):
    """Assignment of choices to U rows."""

    row_MZ: jax.Array
    """The row of each choice; U for a choice without a row."""
    token_U: jax.Array
    """The token of each row; M for an empty row."""


def sort_choices(choices: Choices, num_experts: int) -> ExpertRows:
    """All choices as rows in order of experts, with choices of no expert at the end."""
    M, Z = choices.expert_MZ.shape
    token_MZ = jnp.broadcast_to(jnp.arange(M, dtype=jnp.int32)[:, None], (M, Z))
    columns = (choices.expert_MZ, token_MZ, choices.weight_MZ)
    columns = tuple(column.reshape(-1) for column in columns)
    _, token_U, weight_U = jax.lax.sort(columns, is_stable=True, num_keys=1)
    load_E = load(choices.expert_MZ, num_experts)
    return ExpertRows(token_U, weight_U, jnp.cumsum(load_E) - load_E, load_E)


def assign_ragged_rows(expert_MZ: jax.Array, num_experts: int) -> RowAssignment:
    """Assign a row to every choice, in order of experts and without gaps."""
    rank_MZ, load_E = _ranks(expert_MZ, num_experts)
    first_E = jnp.cumsum(load_E) - load_E
    first_MZ = first_E.at[expert_MZ].get(mode="fill", fill_value=expert_MZ.size)
    row_MZ = jnp.minimum(first_MZ + rank_MZ, expert_MZ.size)
    return RowAssignment(row_MZ, _tokens(row_MZ, expert_MZ.size))


def assign_capacity_rows(expert_MZ: jax.Array, num_experts: int, capacity: int) -> RowAssignment:
    """Assign choices to the rows of their experts; choices past the capacity get no row."""
    num_rows = num_experts * capacity
    rank_MZ, _ = _ranks(expert_MZ, num_experts)
    has_row_MZ = (rank_MZ < capacity) & (expert_MZ < num_experts)
    row_MZ = jnp.where(has_row_MZ, expert_MZ * capacity + rank_MZ, num_rows)
    return RowAssignment(row_MZ, _tokens(row_MZ, num_rows))


def received_rows(num_experts: int, capacity: int) -> ExpertRows:
    """Rows that other devices filled: every row of every expert may hold a token."""
    num_rows = num_experts * capacity
    first_E = jnp.arange(num_experts, dtype=jnp.int32) * capacity
    load_E = jnp.full(num_experts, capacity, jnp.int32)
    row_U = jnp.arange(num_rows, dtype=jnp.int32)
    return ExpertRows(row_U, jnp.ones(num_rows, jnp.float32), first_E, load_E)


def load(expert_MZ: jax.Array, num_experts: int) -> jax.Array:
    """The number of choices of each expert, `load_E`."""
    return jnp.bincount(expert_MZ.reshape(-1), length=num_experts + 1)[:-1].astype(jnp.int32)


def _ranks(expert_MZ: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array]:
    """The number of earlier choices of the same expert, and the load of each expert."""
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
