"""A deterministic automaton over bytes as a table. Does not know how it is made or used."""

from dataclasses import dataclass

import numpy as np

DEAD, START = 0, 1


@dataclass(frozen=True, eq=False)
class ByteAutomaton:
    """A deterministic automaton. State 0 accepts nothing, and state 1 is the first."""

    next_SC: np.ndarray
    """The next state of each state for each class of bytes."""
    class_of_byte: np.ndarray
    is_accepting_S: np.ndarray

    @property
    def num_states(self) -> int:
        """The number of states."""
        return len(self.next_SC)

    @property
    def is_empty(self) -> bool:
        """Whether no text is in the language."""
        return not self.is_accepting_S[START] and bool((self.next_SC[START] == DEAD).all())

    def accepts(self, text: bytes) -> bool:
        """Whether a text is in the language."""
        state = START
        for byte in text:
            state = self.next_SC[state, self.class_of_byte[byte]]
        return bool(self.is_accepting_S[state])
