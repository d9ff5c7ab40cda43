"""Puts the automata of all forms of a job into one set of tables of planned sizes.

Does not know about devices, schemas or requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ...compile.grids.structured_grid import MAX_LEVELS, StructuredGrid
from ...modelzoo.structure import BITS, StructureTables
from .token_automaton import TableSizes, TokenAutomaton


@dataclass(frozen=True)
class PackedStructures:
    """The tables of a plan as numpy arrays, and the facts that requests need."""

    tables: StructureTables
    first_states: dict[str, int]
    """The first state of each form."""
    shortest: dict[str, int]
    """The number of tokens of each form's shortest answer, its end token included."""


def pack_tables(
    grid: StructuredGrid, automata: Mapping[str, TokenAutomaton], padded_vocab: int
) -> PackedStructures:
    """Put the automata of a plan into one set of tables.

    Args:
      grid: The sizes, and the forms in order.
      automata: The automata by the hash of their form.
      padded_vocab: The vocabulary size of the logits, padding included.

    Raises:
      ValueError: The automata need larger tables than the plan has.
    """
    found = [automata.get(schema) for schema in grid.schemas]
    sizes = TableSizes()
    for automaton in filter(None, found):
        sizes = sizes.plus(automaton)
    needed = (sizes.states, sizes.classes, sizes.masks)
    planned = (grid.states, grid.classes, grid.masks)
    if any(size > limit for size, limit in zip(needed, planned, strict=True)):
        raise ValueError(
            f"plan [structured]: expected states, classes and masks of at least {needed}, got "
            f"{planned}. Plan again."
        )
    S, K, num_words = grid.states, len(grid.schemas) + 1, -(-padded_vocab // BITS)
    next_SC = np.zeros((S, grid.classes), np.int16)
    schema_S = np.zeros(S, np.int32)
    class_KV = np.zeros((K, padded_vocab), np.int16)
    needs_SL = np.full((S, MAX_LEVELS), np.iinfo(np.int32).max, np.int32)
    mask_SL = np.zeros((S, MAX_LEVELS), np.int32)
    masks_MW = np.zeros((grid.masks, num_words), np.uint32)
    # rows without a schema
    needs_SL[0, 0], masks_MW[0] = 0, 0xFFFFFFFF
    first_state, first_mask = 1, 1
    first_states = dict.fromkeys(grid.schemas, 0)
    for k, (schema, automaton) in enumerate(zip(grid.schemas, found, strict=True), start=1):
        if automaton is None:
            continue
        own = slice(first_state, first_state + len(automaton.next_SC))
        next_SC[own, : automaton.next_SC.shape[1]] = automaton.next_SC
        schema_S[own], first_states[schema] = k, first_state
        class_KV[k, : len(automaton.class_of_token)] = automaton.class_of_token
        needs_SL[own], mask_SL[own] = automaton.needs_SL, automaton.mask_SL + first_mask
        end_mask = first_mask + len(automaton.masks_MV)
        masks_MV = masks_MW[first_mask:end_mask].view(np.uint8)
        masks_MV[:, : automaton.masks_MV.shape[1]] = automaton.masks_MV
        first_state, first_mask = own.stop, end_mask
    first_K = np.array([0, *first_states.values()], np.int32)
    tables = StructureTables._make(
        (next_SC, schema_S, first_K, class_KV, needs_SL, mask_SL, masks_MW)
    )
    served = {s: a.shortest for s, a in zip(grid.schemas, found, strict=True) if a is not None}
    return PackedStructures(tables, {s: first_states[s] for s in served}, served)
