"""Compiles the tokens that answers may have to automata over tokens, as forms are.

A state of the automaton is the longest end of the answer that begins a forbidden sequence (Aho and
Corasick 1975), so every forbidden sequence is seen at its last token, wherever it begins. Does not
know about jobs, forms or devices. Guarantees: an answer never has a forbidden sequence or a token
that is not allowed, and from every state some token is allowed.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence

import numpy as np

from ...compile.grids.structured_grid import CLASSES_OF_BLOCK
from ..errors import RowError
from ..parameters.checks import wrong_value
from .params import AllowedTokens
from .token_automaton import FAR, MAX_MOVES, Blocks, TokenAutomaton, TooLarge, levels_of, reachable

EncodeTexts = Callable[[Sequence[str]], Sequence[list[int] | RowError]]
"""Encodes texts in which special tokens are parsed, without BOS."""
_NOT_ALLOWED, _OTHER = 0, 1
"""The classes of tokens that are never allowed, and of tokens that are in no sequence."""


def compile_allowed(
    allowed: AllowedTokens, vocab_size: int, encode: EncodeTexts | None
) -> TokenAutomaton:
    """The automaton of the answers that have allowed tokens only.

    Args:
      allowed: The allowed tokens, and the words that are forbidden.
      vocab_size: The number of token ids of the model.
      encode: Encodes the words; None for a model without a tokenizer.

    Raises:
      RowError: An id is not in the vocabulary, a word cannot be encoded, the words are too many, or
        they leave no token somewhere.
    """
    is_allowed_V = _allowed_ids(allowed, vocab_size)
    sequences = _sequences(allowed.bad_words, encode)
    # an id without an embedding is never generated
    sequences = {ids for ids in sequences if max(ids) < vocab_size}
    try:
        return _automaton(sequences, is_allowed_V)
    except TooLarge:
        expected = "fewer words, whose tokens together make a smaller table"
        raise wrong_value("bad_words", expected, f"{len(allowed.bad_words)} words") from None


def _allowed_ids(allowed: AllowedTokens, vocab_size: int) -> np.ndarray:
    if allowed.token_ids is None:
        return np.ones(vocab_size, bool)
    is_allowed_V = np.zeros(vocab_size, bool)
    for token in allowed.token_ids:
        if token >= vocab_size:
            raise RowError(
                "invalid_token_id",
                f"allowed_token_ids: expected ids from 0 to {vocab_size - 1}, got {token}.",
                "allowed_token_ids",
            )
        is_allowed_V[token] = True
    return is_allowed_V


def _sequences(words: Sequence[str], encode: EncodeTexts | None) -> set[tuple[int, ...]]:
    """The token sequences of words, at the beginning of a text and after a space."""
    if not words:
        return set()
    if encode is None:
        raise wrong_value("bad_words", "none, as the model has no tokenizer", list(words))
    stripped = [word.lstrip() for word in words]
    found = set()
    for ids in encode([*stripped, *(f" {word}" for word in stripped)]):
        if isinstance(ids, RowError):
            raise RowError(ids.code, f"bad_words: {ids.message}", "bad_words")
        if not ids:
            raise wrong_value("bad_words", "words that have tokens", list(words))
        found.add(tuple(ids))
    return found


def _automaton(sequences: Collection[tuple[int, ...]], is_allowed_V: np.ndarray) -> TokenAutomaton:
    tokens = sorted({token for sequence in sequences for token in sequence})
    class_of_token = np.where(is_allowed_V, _OTHER, _NOT_ALLOWED).astype(np.int16)
    if len(tokens) + 2 >= FAR:
        raise TooLarge(None)
    class_of_token[tokens] = np.arange(_OTHER + 1, len(tokens) + 2)
    next_SC, is_forbidden_SC = _moves(sequences, class_of_token, len(tokens) + 2)
    is_forbidden_SC[:, _NOT_ALLOWED] = True
    is_forbidden_SC[:, _OTHER] |= not (class_of_token == _OTHER).any()
    is_forbidden_SC[:, class_of_token[[token for token in tokens if not is_allowed_V[token]]]] = (
        True
    )
    next_SC[is_forbidden_SC] = 0
    reached = reachable(next_SC, 0, np.ones(len(next_SC), bool))
    if is_forbidden_SC[reached].all(axis=1).any():
        key = "bad_words" if is_allowed_V.all() else "allowed_token_ids"
        raise wrong_value(
            key, "a token that may follow everywhere", "sequences after which none may"
        )
    blocks = Blocks(CLASSES_OF_BLOCK, np.int16)
    move_block_SI = blocks.add(next_SC)
    # no number of tokens must be left, as an answer may end anywhere
    need_SC = np.where(is_forbidden_SC, FAR, 0).astype(np.int16)
    return TokenAutomaton(
        class_of_token, move_block_SI, blocks.stacked(), *levels_of(class_of_token, need_SC)
    )


def _moves(
    sequences: Collection[tuple[int, ...]], class_of_token: np.ndarray, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """The next state of each state for each class, and whether it completes a sequence."""
    children: list[dict[int, int]] = [{}]
    is_whole = [False]
    for sequence in sequences:
        node = 0
        for each in class_of_token[list(sequence)].tolist():
            if each not in children[node]:
                children[node][each] = len(children)
                children.append({})
                is_whole.append(False)
            node = children[node][each]
        is_whole[node] = True
    if len(children) * num_classes > MAX_MOVES or len(children) >= FAR:
        raise TooLarge(None)
    next_SC = np.zeros((len(children), num_classes), np.int16)
    is_forbidden_SC = np.zeros((len(children), num_classes), bool)
    waiting = deque([(0, 0)])
    while waiting:
        # a state moves as the next shorter end does, apart from its own longer sequences
        node, shorter = waiting.popleft()
        next_SC[node], is_forbidden_SC[node] = next_SC[shorter], is_forbidden_SC[shorter]
        for each, child in children[node].items():
            next_shorter = int(next_SC[shorter, each]) if node else 0
            next_SC[node, each] = child
            is_forbidden_SC[node, each] |= is_whole[child]
            if not is_forbidden_SC[node, each]:
                waiting.append((child, next_shorter))
    return next_SC, is_forbidden_SC
