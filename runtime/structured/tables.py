"""Puts the automata of all forms of a job into one set of tables of planned sizes.

Does not know about devices, schemas or requests.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from ...compile.grids.structured_grid import (
    CLASSES_OF_BLOCK,
    MAX_LEVELS,
    TOKENS_OF_BLOCK,
    StructuredGrid,
)
from ...modelzoo.structure import BITS, StructureTables
from ..errors import UserError
from .token_automaton import Blocks, TokenAutomaton

_WORDS_OF_BLOCK = TOKENS_OF_BLOCK // BITS


@dataclass(frozen=True)
class PackedStructures:
    """The tables of a plan as numpy arrays, and the facts that requests need."""

    tables: StructureTables
    first_states: dict[str, int]
    """The first state of each form."""
    automata: Mapping[str, TokenAutomaton]
    """The automaton of each form."""


class JobTables:
    """The sizes of the tables of some automata together, which share equal blocks.

    State 0 and mask 0 are those of rows without a form; the mask allows every token.
    """

    def __init__(self):
        self.states = self.classes = self.masks = self.forms = 1
        self._moves = Blocks(CLASSES_OF_BLOCK, np.int16)
        self._words = Blocks(_WORDS_OF_BLOCK, np.uint32)
        self._every_token = self._words.add(np.full((1, _WORDS_OF_BLOCK), 0xFFFFFFFF, np.uint32))

    def add(self, automaton: TokenAutomaton) -> tuple[np.ndarray, np.ndarray]:
        """Count one automaton more; return the block numbers of its moves and its masks."""
        self.states += automaton.num_states
        self.classes = max(self.classes, automaton.num_classes)
        self.masks += len(automaton.mask_block_MJ)
        self.forms += 1
        moves, words = self._moves.add(automaton.moves_PA), self._words.add(automaton.words_QU)
        return moves[automaton.move_block_SI, 0], words[automaton.mask_block_MJ, 0]

    def num_bytes(self, vocab_size: int) -> int:
        """The size of the tables in bytes; each state has blocks for all `classes`."""
        of_state = 4 * -(-self.classes // CLASSES_OF_BLOCK) + 4 + 8 * MAX_LEVELS
        of_mask = 4 * -(-vocab_size // TOKENS_OF_BLOCK)
        of_form = 4 + 2 * vocab_size
        of_blocks = 2 * CLASSES_OF_BLOCK * len(self._moves) + 4 * _WORDS_OF_BLOCK * len(self._words)
        return self.states * of_state + self.masks * of_mask + self.forms * of_form + of_blocks

    def grid(self, schemas: Collection[str]) -> StructuredGrid:
        """The sizes, as a plan has them."""
        num_moves, num_words = len(self._moves), len(self._words)
        return StructuredGrid(
            self.states, self.classes, self.masks, num_moves, num_words, tuple(schemas)
        )

    def empty(self, grid: StructuredGrid, padded_vocab: int) -> StructureTables:
        """Tables of planned sizes with only the blocks, and the entries of rows without a form."""
        S, K = grid.states, len(grid.schemas) + 1
        needs_SL = np.full((S, MAX_LEVELS), np.iinfo(np.int32).max, np.int32)
        needs_SL[0, 0] = 0
        moves_PA = np.zeros((grid.move_blocks, CLASSES_OF_BLOCK), np.int16)
        moves_PA[: len(self._moves)] = self._moves.stacked()
        words_QU = np.zeros((grid.mask_blocks, _WORDS_OF_BLOCK), np.uint32)
        words_QU[: len(self._words)] = self._words.stacked()
        mask_block_MJ = np.zeros((grid.masks, -(-padded_vocab // TOKENS_OF_BLOCK)), np.int32)
        mask_block_MJ[0] = self._every_token
        return StructureTables._make(
            (
                np.zeros((S, -(-grid.classes // CLASSES_OF_BLOCK)), np.int32),
                moves_PA,
                np.zeros(S, np.int32),
                np.zeros(K, np.int32),
                np.zeros((K, padded_vocab), np.int16),
                needs_SL,
                np.zeros((S, MAX_LEVELS), np.int32),
                mask_block_MJ,
                words_QU,
            )
        )


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
    job = JobTables()
    blocks = {schema: job.add(automata[schema]) for schema in grid.schemas if schema in automata}
    needed = job.grid(grid.schemas)
    for name in ("states", "classes", "masks", "move_blocks", "mask_blocks"):
        if getattr(needed, name) > getattr(grid, name):
            raise UserError(
                f"plan [structured]: expected {name} of at least {getattr(needed, name)}, got "
                f"{getattr(grid, name)}. Plan again."
            )
    tables = job.empty(grid, padded_vocab)
    first_state, first_mask = 1, 1
    first_states = dict.fromkeys(grid.schemas, 0)
    for k, schema in enumerate(grid.schemas, start=1):
        if schema not in automata:
            continue
        automaton, (moves, words) = automata[schema], blocks[schema]
        own = slice(first_state, first_state + len(moves))
        masks = slice(first_mask, first_mask + len(words))
        tables.move_block_SI[own, : moves.shape[1]] = moves
        tables.mask_block_MJ[masks, : words.shape[1]] = words
        tables.schema_S[own], tables.first_K[k] = k, first_state
        tables.class_KV[k, : len(automaton.class_of_token)] = automaton.class_of_token
        tables.needs_SL[own] = automaton.needs_SL
        tables.mask_SL[own] = automaton.mask_SL + first_mask
        first_states[schema] = first_state
        first_state, first_mask = own.stop, masks.stop
    served = {schema: automata[schema] for schema in blocks}
    return PackedStructures(tables, {s: first_states[s] for s in served}, served)
