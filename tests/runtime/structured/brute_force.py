"""A slow and plain automaton over tokens, which walks bytes and searches for endings."""

from collections import deque

from noria.runtime.structured.automaton import DEAD, START, ByteAutomaton


class BruteForce:
    """The tokens that may come after a text if a number of tokens are left."""

    def __init__(self, automaton: ByteAutomaton, texts: list[bytes], end_ids: set[int]):
        self.automaton, self.end_ids = automaton, end_ids
        self.texts = {token: text for token, text in enumerate(texts) if text}
        self._next: dict[int, dict[int, int]] = {}
        self.least = self._least()

    def next_of(self, state: int) -> dict[int, int]:
        """The next state for each token that keeps the automaton alive."""
        if state not in self._next:
            self._next[state] = {}
            for token, text in self.texts.items():
                if (end := self._after(state, text)) != DEAD:
                    self._next[state][token] = end
        return self._next[state]

    def allowed(self, state: int, left: int) -> set[int]:
        """The tokens after which the text can still be completed, the end token included."""
        found = {
            token
            for token, after in self.next_of(state).items()
            if self.least.get(after, 10**9) <= left - 1
        }
        if self.automaton.is_accepting_S[state] and left >= 1:
            found |= self.end_ids
        return found

    def _after(self, state: int, text: bytes) -> int:
        for byte in text:
            state = int(self.automaton.next_SC[state, self.automaton.class_of_byte[byte]])
            if state == DEAD:
                break
        return state

    def _least(self) -> dict[int, int]:
        """The tokens that each reachable state needs to end, its end token included."""
        seen, waiting, before = {START}, deque([START]), {}
        while waiting:
            state = waiting.popleft()
            for after in set(self.next_of(state).values()):
                before.setdefault(after, set()).add(state)
                if after not in seen:
                    seen.add(after)
                    waiting.append(after)
        least = {state: 1 for state in seen if self.automaton.is_accepting_S[state]}
        waiting = deque(least)
        while waiting:
            state = waiting.popleft()
            for earlier in before.get(state, ()):
                if earlier not in least:
                    least[earlier] = least[state] + 1
                    waiting.append(earlier)
        return least
