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
from typing import NamedTuple

import numpy as np

from ...compile.grids.structured_grid import MAX_LEVELS
from .automaton import DEAD, START, ByteAutomaton
from .byte_automaton import TooLarge, steps_to

_BLOCK = 1 << 22
"""Maximum number of entries of the arrays that a walk over the vocabulary makes at once."""
_NEVER = np.iinfo(np.int32).max


MAX_BYTES = 8 << 20
"""Maximum size of the states' moves, and of the masks, of one automaton."""


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

    def walk(self, automaton: ByteAutomaton, states: np.ndarray) -> np.ndarray:
        """The state of each node for each of some states at the root."""
        next_CS = automaton.next_SC.T.reshape(-1)
        rows = automaton.class_of_byte[self.last_bytes].astype(np.int32) * automaton.num_states
        reached = np.empty((len(self.parents), len(states)), np.int32)
        reached[0] = states
        for start, end in zip(self.level_starts[1:-1], self.level_starts[2:], strict=True):
            index = reached[self.parents[start:end]]
            index += rows[start:end, None]
            np.take(next_CS, index, out=reached[start:end])
        return reached


@dataclass(frozen=True, eq=False)
class TokenAutomaton:
    """An automaton over tokens. State 0 is the first.

    A state has levels: if at least `needs_SL` tokens are left, the mask of the level allows the
    tokens after which the text can still be completed, its end token included.
    """

    class_of_token: np.ndarray
    next_SC: np.ndarray
    """The next state for each class of tokens; 0 where no token of the class is allowed."""
    needs_SL: np.ndarray
    """In growing order, and the largest integer for levels that a state does not have."""
    mask_SL: np.ndarray
    """The index of the mask of each level."""
    masks_MV: np.ndarray
    """Whether each mask allows each token, as bits of bytes, lowest first."""

    @property
    def shortest(self) -> int:
        """The number of tokens of the shortest text, its end token included."""
        return int(self.needs_SL[0, 0])


class TableSizes(NamedTuple):
    """The sizes of the tables of some automata together, and of rows without a form."""

    states: int = 1
    classes: int = 1
    masks: int = 1
    forms: int = 1

    def plus(self, automaton: TokenAutomaton) -> "TableSizes":
        """The sizes with one automaton more."""
        states, classes = automaton.next_SC.shape
        return TableSizes(
            self.states + states,
            max(self.classes, classes),
            self.masks + len(automaton.masks_MV),
            self.forms + 1,
        )

    def num_bytes(self, vocab_size: int) -> int:
        """The size of the tables in bytes; each state has a column for each of `classes`."""
        of_state = 2 * self.classes + 4 + 8 * MAX_LEVELS
        of_form = 4 + 2 * vocab_size
        return self.states * of_state + self.forms * of_form + self.masks * vocab_size // 8


def compile_tokens(automaton: ByteAutomaton, trie: TokenTrie) -> TokenAutomaton:
    """Make the automaton over the tokens of a vocabulary.

    Raises:
      NoTokens: No tokens spell a text of the language.
      TooLarge: A table would be larger than `MAX_BYTES`.
    """
    class_of_token = _token_classes(automaton, trie)
    num_classes = int(class_of_token.max()) + 1
    # before they are made, with two bytes for each move
    if 2 * automaton.num_states * num_classes > MAX_BYTES:
        raise TooLarge(None)
    first_token = np.full(num_classes, trie.vocab_size)
    np.minimum.at(first_token, class_of_token, np.arange(trie.vocab_size))
    next_SC = _next_of_tokens(automaton, [trie.texts[token] for token in first_token])
    # one class more for the tokens that end a text
    class_of_token[trie.end_ids] = num_classes
    need_S = 1 + steps_to(automaton.is_accepting_S, next_SC)
    if not np.isfinite(need_S[START]):
        raise NoTokens
    kept = _reachable(next_SC, np.isfinite(need_S))
    renumbered = np.zeros(len(next_SC), np.int16)
    renumbered[kept] = np.arange(len(kept))
    need_S = np.where(np.isfinite(need_S), need_S, _NEVER).astype(np.int64)
    after_SC = np.where(next_SC == DEAD, _NEVER, need_S[next_SC])[kept]
    need_SC = np.minimum(after_SC + 1, _NEVER).astype(np.int32)
    ends_S1 = np.where(automaton.is_accepting_S[kept], 1, _NEVER).astype(np.int32)[:, None]
    next_SC = np.where(need_SC < _NEVER, renumbered[next_SC[kept]], 0).astype(np.int16)
    next_SC = np.pad(next_SC, ((0, 0), (0, 1)))
    return _with_masks(class_of_token, next_SC, np.hstack([need_SC, ends_S1]))


def _token_classes(automaton: ByteAutomaton, trie: TokenTrie) -> np.ndarray:
    """The class of each token; tokens that no state allows are in class 0 with those of no text."""
    S = automaton.num_states
    size = max(1, min(S, _BLOCK // len(trie.parents)))
    # two hashes of 64 bits: tokens whose moves differ have equal ones with a chance of 2**-128
    factors_2S = np.random.Generator(np.random.PCG64(0)).integers(
        1, 2**64, (2, S), np.uint64, endpoint=False
    )
    hashes_2N = np.zeros((2, len(trie.parents)), np.uint64)
    for start in range(0, S, size):
        states = np.arange(start, min(S, start + size))
        reached = trie.walk(automaton, states).astype(np.uint64)
        for half in range(2):
            hashes_2N[half] += reached @ factors_2S[half, states]
    hashes_2N[:, 0] = 0
    _, class_of_node = np.unique(hashes_2N, axis=1, return_inverse=True)
    class_of_node = class_of_node.reshape(-1)
    # class 0 is that of the root, also if every token is allowed somewhere
    order = np.arange(class_of_node.max() + 1)
    order[[0, class_of_node[0]]] = order[[class_of_node[0], 0]]
    classes = order[class_of_node][trie.node_of_token]
    _, dense = np.unique(np.append(classes, 0), return_inverse=True)
    return dense[:-1].astype(np.int16)


def _next_of_tokens(automaton: ByteAutomaton, texts: Sequence[bytes]) -> np.ndarray:
    """The next state of every state for each of some texts; dead for an empty one."""
    S = automaton.num_states
    next_SC = np.zeros((S, len(texts)), np.int32)
    for number, text in enumerate(texts):
        state_S = np.arange(S) if text else np.zeros(S, np.int32)
        for byte in text:
            state_S = automaton.next_SC[state_S, automaton.class_of_byte[byte]]
        next_SC[:, number] = state_S
    return next_SC


def _reachable(next_SC: np.ndarray, is_alive_S: np.ndarray) -> np.ndarray:
    """The living states that can be reached from the first, which comes first."""
    is_found_S = np.zeros(len(next_SC), bool)
    waiting = np.array([START])
    while len(waiting):
        is_found_S[waiting] = True
        following = np.unique(next_SC[waiting])
        waiting = following[is_alive_S[following] & ~is_found_S[following]]
    return np.flatnonzero(is_found_S)


def _with_masks(
    class_of_token: np.ndarray, next_SC: np.ndarray, need_SC: np.ndarray
) -> TokenAutomaton:
    """Add the levels of each state and their masks."""
    S = len(next_SC)
    needs_SL = np.full((S, MAX_LEVELS), _NEVER, np.int32)
    mask_SL = np.zeros((S, MAX_LEVELS), np.int32)
    masks: dict[bytes, int] = {}
    rows: list[np.ndarray] = []
    for state, need_C in enumerate(need_SC):
        levels = np.unique(need_C)
        levels = levels[levels < _NEVER]
        # beyond the table, the last level waits for the token that needs most
        levels = np.append(levels[: MAX_LEVELS - 1], levels[MAX_LEVELS - 1 :][-1:])
        needs_SL[state, : len(levels)] = levels
        for level, need in enumerate(levels):
            is_allowed_C = need_C <= need
            key = np.packbits(is_allowed_C).tobytes()
            if key not in masks:
                masks[key] = len(masks)
                if len(masks) * len(class_of_token) > 8 * MAX_BYTES:
                    raise TooLarge(None)
                rows.append(np.packbits(is_allowed_C[class_of_token], bitorder="little"))
            mask_SL[state, level] = masks[key]
    return TokenAutomaton(class_of_token, next_SC, needs_SL, mask_SL, np.stack(rows))
