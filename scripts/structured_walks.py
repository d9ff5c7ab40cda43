"""Compare the masks of forms with a slow walk over bytes, at every step of random answers.

    python scripts/structured_walks.py --walks 10000

The vocabulary is small and has parts of characters, pieces of JSON, and special tokens with the
text of plain ones. Each walk has a random number of tokens left, and must end in time, with an
end token or complete at its last token.
"""

import argparse
import random
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from noria.compile.grids.structured_grid import MAX_LEVELS
from noria.modelzoo.structure import StructureTables
from noria.runtime.structured.byte_automaton import compile_language
from noria.runtime.structured.form_compiler import RECURSIONS, make_trie, read_form
from noria.runtime.structured.language import DEAD, START, ByteAutomaton
from noria.runtime.structured.params import StructuredOutputsParams
from noria.runtime.structured.structures import Structures
from noria.runtime.structured.tables import PackedStructures
from noria.runtime.structured.token_automaton import TokenTrie

SPECIAL = {0: b"<start>", 1: b"{", 2: b"<end>"}
"""Special tokens; one has the text of a plain token."""
END_IDS = {2, 98}
"""Tokens that end a text; one of them is not special."""
PADDED_VOCAB = 320


def tokens(seed: int = 0) -> list[bytes]:
    """The bytes of a small vocabulary."""
    draw = random.Random(seed)
    pieces = ['{"', '":', '": "', '", "', '"}', "name", "na", "[1", ", ", "true", "nul", "-1", "é"]
    pieces += ["中", '\\"', "null", "12", "00", "}, {", "a" * 5, " ", '"a', "-", "T00:", "😀"]
    pieces += ["".join(draw.choices('{}[]",: aen10-é\\', k=draw.randint(2, 4))) for _ in range(20)]
    parts = [bytes([byte]) for byte in range(32, 128)] + [text.encode() for text in pieces]
    parts += ["中".encode()[:2], "😀".encode()[1:], b"\xc3", b"\xa9", b"\xe4", b"\xb8", b"\xad"]
    return [*SPECIAL.values(), *parts]


def trie() -> TokenTrie:
    """The vocabulary as the library reads it."""
    texts = tokens()
    return make_trie(texts.__getitem__, len(texts), SPECIAL, END_IDS)


class ByteWalk:
    """The tokens that may come after a text, found by walking bytes and searching for endings."""

    def __init__(self, automaton: ByteAutomaton):
        self.automaton = automaton
        texts = enumerate(tokens())
        self._texts = {i: text for i, text in texts if i not in SPECIAL and i not in END_IDS}
        self._next: dict[int, dict[int, int]] = {}

    def next_of(self, state: int) -> dict[int, int]:
        """The next state for each token that keeps the automaton alive."""
        if state not in self._next:
            ends = {token: self._after(state, text) for token, text in self._texts.items()}
            self._next[state] = {token: end for token, end in ends.items() if end != DEAD}
        return self._next[state]

    def allowed(self, state: int, left: int) -> set[int]:
        """The tokens after which the text can still be completed, and end tokens."""
        found = {
            token
            for token, after in self.next_of(state).items()
            if self.least.get(after, left) < left
        }
        return found | (END_IDS if self.automaton.is_accepting_S[state] and left else set())

    @cached_property
    def least(self) -> dict[int, int]:
        """The tokens that complete the text, for each reachable state."""
        before: dict[int, set[int]] = {START: set()}
        waiting = deque([START])
        while waiting:
            state = waiting.popleft()
            for after in set(self.next_of(state).values()):
                if after not in before:
                    before[after] = set()
                    waiting.append(after)
                before[after].add(state)
        least = {state: 0 for state in before if self.automaton.is_accepting_S[state]}
        waiting = deque(least)
        while waiting:
            state = waiting.popleft()
            for earlier in before[state] - set(least):
                least[earlier] = least[state] + 1
                waiting.append(earlier)
        return least

    def _after(self, state: int, text: bytes) -> int:
        for byte in text:
            state = int(self.automaton.next_SC[state, self.automaton.class_of_byte[byte]])
            if state == DEAD:
                break
        return state


class Walks:
    """Random answers in the tables of several forms together."""

    def __init__(self, forms: Iterable[StructuredOutputsParams]):
        self.forms = list(forms)
        structures = Structures(trie)
        for form in self.forms:
            structures.automaton(form)
        grid = structures.grid({form.fingerprint for form in self.forms})
        assert grid is not None
        self.packed: PackedStructures = structures.pack(grid, PADDED_VOCAB)

    @property
    def tables(self) -> StructureTables:
        return self.packed.tables

    def check(self, form: StructuredOutputsParams, num_walks: int, draw: random.Random) -> int:
        """Walk some times, and compare every mask; return the number of masks."""
        plain, num_masks = ByteWalk(compile_language(read_form(form, RECURSIONS[0]).language)), 0
        # an answer has at least one token, if only an end token
        shortest = max(1, plain.least[START])
        assert self.packed.automata[form.fingerprint].shortest == shortest
        for _ in range(num_walks):
            left = shortest + draw.randint(0, 12)
            state, byte_state = self.packed.first_states[form.fingerprint], START
            while True:
                allowed, expected = self.allowed(state, left), plain.allowed(byte_state, left)
                num_masks += 1
                if (self.tables.needs_SL[state] < 2**31 - 1).sum() < MAX_LEVELS:
                    assert allowed == expected, (form, state, left)
                # if a state has more levels than the tables hold, some tokens are left out
                assert allowed and allowed <= expected, (form, state, left)
                token = draw.choice(sorted(allowed))
                left -= 1
                if token in END_IDS:
                    assert plain.automaton.is_accepting_S[byte_state]
                    break
                byte_state = plain.next_of(byte_state)[token]
                if not left:
                    assert plain.automaton.is_accepting_S[byte_state]
                    break
                state = self.following(state, token)
        return num_masks

    def allowed(self, state: int, left: int) -> set[int]:
        """The tokens of a mask, by the arithmetic of the device, for one row in numpy."""
        return set(np.flatnonzero(self.bits(state, left)).tolist())

    def bits(self, state: int, left: int) -> np.ndarray:
        """A mask as one number a token."""
        level = max(int((np.asarray(self.tables.needs_SL)[state] <= left).sum()) - 1, 0)
        tables = self.tables
        words_JU = tables.words_QU[tables.mask_block_MJ[tables.mask_SL[state, level]]]
        return np.unpackbits(np.asarray(words_JU).view(np.uint8).reshape(-1), bitorder="little")[
            :PADDED_VOCAB
        ]

    def following(self, state: int, token: int) -> int:
        """The next state, by the arithmetic of the device."""
        schema, tables = int(self.tables.schema_S[state]), self.tables
        place, within = divmod(int(tables.class_KV[schema, token]), tables.moves_PA.shape[1])
        block = tables.move_block_SI[state, place]
        return int(tables.first_K[schema] + tables.moves_PA[block, within])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--walks", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    # beside this script, but not for tests that import it
    from structured_rows import FORMS

    draw = random.Random(options.seed)
    walks = Walks(StructuredOutputsParams(**form) for form in FORMS.values())
    each = -(-options.walks // len(walks.forms))
    num_masks = sum(walks.check(form, each, draw) for form in walks.forms)
    print(f"{each * len(walks.forms)} walks, {num_masks} masks: all equal")


if __name__ == "__main__":
    main()
