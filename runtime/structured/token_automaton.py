"""Automata over the tokens of a vocabulary, made from automata over bytes.

A token leads to the state to which its bytes lead. Tokens that lead to the same state from every
state form a class, so a table has a column for each class. Does not know about schemas, requests or
devices.

Guarantees: from every state some allowed token leads nearer to the end, so a text can be completed
from everywhere; special tokens are never allowed; end tokens are allowed exactly where the text so
far is in the language.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ...compile.grids.structured_grid import CLASSES_OF_BLOCK, MAX_LEVELS, TOKENS_OF_BLOCK
from .byte_automaton import TooLarge, steps_to
from .language import DEAD, START, ByteAutomaton


class Blocks:
    """Different blocks of one width, in the order in which they came. The first is all zeros.

    Args:
      width: The number of entries of a block.
      dtype: The type of an entry.
    """

    def __init__(self, width: int, dtype: npt.DTypeLike):
        self._width, self._dtype = width, np.dtype(dtype)
        self._numbers: dict[bytes, int] = {}
        self.add(np.zeros((1, width), dtype))

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, rows_RX: np.ndarray) -> np.ndarray:
        """The numbers of the blocks of some rows, whose last blocks are completed by zeros."""
        num_rows, num_entries = rows_RX.shape
        num_blocks = -(-num_entries // self._width)
        padded = np.zeros((num_rows, num_blocks * self._width), self._dtype)
        padded[:, :num_entries] = rows_RX
        size = self._width * self._dtype.itemsize
        text, numbers = padded.tobytes(), self._numbers
        found = [
            numbers.setdefault(text[start : start + size], len(numbers))
            for start in range(0, len(text), size)
        ]
        return np.array(found, np.int32).reshape(num_rows, num_blocks)

    def stacked(self) -> np.ndarray:
        """All blocks as one table."""
        return np.frombuffer(b"".join(self._numbers), self._dtype).reshape(-1, self._width)


_NEVER = np.iinfo(np.int32).max
FAR = np.iinfo(np.int16).max
"""More tokens than any automaton needs, as it has fewer states."""
MAX_MOVES = 32 << 20
"""Maximum number of moves: states times the classes of tokens and of beginnings of tokens."""
MAX_MASKS = 8_192
"""Maximum number of masks of one automaton."""


class NoTokens(Exception):
    """The vocabulary has no tokens that spell any text of a language."""


class TokenTrie:
    """The tokens of a vocabulary as a tree of bytes, level by level.

    Args:
      token_bytes: The bytes of each token by id; a token without bytes is never part of a text.
      end_ids: Ids that end a text.
    """

    def __init__(self, token_bytes: Sequence[bytes], end_ids: Collection[int]):
        self.vocab_size = len(token_bytes)
        self.end_ids = sorted(end_ids)
        texts = [b"" if i in end_ids else text for i, text in enumerate(token_bytes)]
        self.texts = texts
        self.node_of_token = np.zeros(len(texts), np.int32)
        """The node of each token; the root for tokens that are no part of texts."""
        parents, last_bytes = [0], [0]
        self.level_starts = [0, 1]
        nodes: dict[tuple[int, int], int] = {}
        current = [(token, 0) for token, text in enumerate(texts) if text]
        depth = 0
        while current:
            following = []
            for token, parent in current:
                key = (parent, texts[token][depth])
                if (node := nodes.get(key)) is None:
                    node = nodes[key] = len(parents)
                    parents.append(parent)
                    last_bytes.append(key[1])
                self.node_of_token[token] = node
                if len(texts[token]) > depth + 1:
                    following.append((token, node))
            current, depth = following, depth + 1
            self.level_starts.append(len(parents))
        self.parents, self.last_bytes = np.array(parents), np.array(last_bytes, np.uint8)


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """An automaton over tokens. State 0 is the first.

    A state has levels: if at least `needs_SL` tokens are left, the mask of the level allows the
    tokens after which the text can still be completed. A complete text needs no end token.
    """

    class_of_token: np.ndarray
    """The class of each token."""
    move_block_SI: np.ndarray
    """The blocks of each state's moves."""
    moves_PA: np.ndarray
    """The next state for each class of tokens; 0 where no token of the class is allowed."""
    needs_SL: np.ndarray
    """The number of tokens that each level of a state needs, in growing order; the largest integer
    for levels that a state does not have."""
    mask_SL: np.ndarray
    """The index of the mask of each level."""
    mask_block_MJ: np.ndarray
    """The blocks of each mask."""
    words_QU: np.ndarray
    """Whether a mask allows each token, one bit a token, the lowest first."""

    @property
    def shortest(self) -> int:
        """The number of tokens of the shortest text; 1 for an empty text, which is an end token.

        It is 0 if the automaton does not say where texts end.
        """
        return int(self.needs_SL[0, 0])

    @property
    def num_states(self) -> int:
        """The number of states."""
        return len(self.needs_SL)

    @property
    def num_classes(self) -> int:
        """The number of classes of tokens."""
        return int(self.class_of_token.max()) + 1

    @cached_property
    def always_allowed(self) -> np.ndarray:
        """Whether each token is allowed in every state, `[V]`, if enough tokens are left."""
        last_S = np.sum(self.needs_SL < _NEVER, axis=1) - 1
        masks = np.unique(np.take_along_axis(self.mask_SL, last_S[:, None], axis=1))
        words_MW = self.words_QU[self.mask_block_MJ[masks]].reshape(len(masks), -1)
        bits = np.bitwise_and.reduce(words_MW).view(np.uint8)
        return np.unpackbits(bits, bitorder="little")[: len(self.class_of_token)].astype(bool)


def compile_tokens(automaton: ByteAutomaton, trie: TokenTrie) -> TokenAutomaton:
    """Make the automaton over the tokens of a vocabulary.

    Raises:
      NoTokens: No tokens spell a text of the language.
      TooLarge: There are more than `MAX_MOVES` or `MAX_MASKS`.
    """
    class_of_token, next_CS = _token_classes(automaton, trie)
    # one class more for the tokens that end a text
    class_of_token[trie.end_ids] = len(next_CS)
    next_SC = np.ascontiguousarray(next_CS.T)
    # a text may end at the limit of its tokens, so it needs no end token
    steps_S = steps_to(automaton.is_accepting_S, next_SC)
    is_alive_S = np.isfinite(steps_S)
    if not is_alive_S[START]:
        raise NoTokens
    kept = reachable(next_SC, START, is_alive_S)
    renumbered = np.zeros(len(next_SC), np.int16)
    renumbered[kept] = np.arange(len(kept))
    # the dead state is not alive, so moves to it need `FAR` tokens
    need_S = np.where(is_alive_S, steps_S + 1, FAR).astype(np.int16)
    next_SC = np.pad(next_SC[kept], ((0, 0), (0, 1)))
    need_SC = need_S[next_SC]
    need_SC[:, -1] = np.where(automaton.is_accepting_S[kept], 1, FAR)
    next_SC = renumbered[next_SC]
    next_SC[need_SC == FAR] = 0
    blocks = Blocks(CLASSES_OF_BLOCK, np.int16)
    move_block_SI = blocks.add(next_SC)
    levels = levels_of(class_of_token, need_SC)
    return TokenAutomaton(class_of_token, move_block_SI, blocks.stacked(), *levels)


def _token_classes(automaton: ByteAutomaton, trie: TokenTrie) -> tuple[np.ndarray, np.ndarray]:
    """The class of each token, and the state that each class leads to from each state, `[C, S]`.

    Class 0 leads nowhere, and holds the tokens that no state allows or that are no text.
    """
    S = automaton.num_states
    max_classes = min(MAX_MOVES // S, FAR - 1)
    next_CS = automaton.next_SC.T.astype(np.int16)
    # beginnings of tokens that lead to the same states are extended together
    moves = [np.full(S, DEAD, np.int16), np.arange(S, dtype=np.int16)]
    classes = {row.tobytes(): number for number, row in enumerate(moves)}
    class_of_node = np.ones(len(trie.parents), np.int32)
    for start, end in zip(trie.level_starts[1:-1], trie.level_starts[2:], strict=True):
        byte_class = automaton.class_of_byte[trie.last_bytes[start:end]]
        steps = class_of_node[trie.parents[start:end]] * np.int64(len(next_CS)) + byte_class
        steps, step_of_node = np.unique(steps, return_inverse=True)
        class_of_step = np.empty(len(steps), np.int32)
        for number, (before, byte) in enumerate(zip(*np.divmod(steps, len(next_CS)), strict=True)):
            row = next_CS[byte][moves[before]]
            key = row.tobytes()
            found = class_of_step[number] = classes.setdefault(key, len(moves))
            if found == len(moves):
                # the row shares the memory of its key
                moves.append(np.frombuffer(key, np.int16))
                if found > max_classes:
                    raise TooLarge(None)
        class_of_node[start:end] = class_of_step[step_of_node]
    class_of_node[0] = 0
    used, class_of_token = np.unique(
        np.append(class_of_node[trie.node_of_token], 0), return_inverse=True
    )
    return class_of_token[:-1].astype(np.int16), np.stack([moves[number] for number in used])


def reachable(next_SC: np.ndarray, first: int, is_alive_S: np.ndarray) -> np.ndarray:
    """The living states that can be reached from the first one, in order."""
    is_found_S = np.zeros(len(next_SC), bool)
    waiting = np.array([first])
    while len(waiting):
        is_found_S[waiting] = True
        following = np.unique(next_SC[waiting])
        waiting = following[is_alive_S[following] & ~is_found_S[following]]
    return np.flatnonzero(is_found_S)


def levels_of(class_of_token: np.ndarray, need_SC: np.ndarray) -> tuple[np.ndarray, ...]:
    """The levels of each state and their masks: the last four tables of an automaton."""
    S = len(need_SC)
    needs_SL = np.full((S, MAX_LEVELS), _NEVER, np.int32)
    mask_SL = np.zeros((S, MAX_LEVELS), np.int32)
    masks: dict[bytes, int] = {}
    blocks = Blocks(TOKENS_OF_BLOCK // 8, np.uint8)
    rows: list[np.ndarray] = []
    for state, need_C in enumerate(need_SC):
        levels = np.unique(need_C)
        levels = levels[levels < FAR]
        # of too many levels, the last column has the largest, at which every move is allowed
        levels = np.append(levels[: MAX_LEVELS - 1], levels[MAX_LEVELS - 1 :][-1:])
        needs_SL[state, : len(levels)] = levels
        for level, need in enumerate(levels):
            is_allowed_C = need_C <= need
            key = np.packbits(is_allowed_C).tobytes()
            if key not in masks:
                masks[key] = len(masks)
                if len(masks) > MAX_MASKS:
                    raise TooLarge(None)
                bits = np.packbits(is_allowed_C[class_of_token], bitorder="little")
                rows.append(blocks.add(bits[None]))
            mask_SL[state, level] = masks[key]
    return needs_SL, mask_SL, np.concatenate(rows), blocks.stacked().view(np.uint32)
