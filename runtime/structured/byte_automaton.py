"""Deterministic automata over the bytes of UTF-8, made from languages.

Does not know about tokens, JSON or requests. Guarantees: an automaton accepts exactly the texts of
its language; the work for a language is bounded, and one that needs more raises `TooLarge` with the
part of the request that made it large.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TypeVar

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from .byte_builder import Builder
from .language import (
    DEAD,
    START,
    ByteAutomaton,
    Characters,
    Compiled,
    Language,
    Literal,
    Origin,
    Repetition,
    Restricted,
    children,
)

MAX_EDGE_STATES = 60_000
"""Maximum number of states of the automaton before it is made deterministic."""
MAX_STATES = 32_000
"""Maximum number of deterministic states."""
MAX_MEMBERS = 500_000
"""Maximum number of states in all sets that become deterministic states: a bound of the time."""
MERGES = 16
"""Maximum number of times that equal states are merged."""
State = TypeVar("State", bound=Hashable)


class TooLarge(Exception):
    """A language needs more states than are allowed; `origin` is the part that needs most."""

    def __init__(self, origin: Origin | None):
        super().__init__(str(origin))
        self.origin = origin


def compile_language(language: Language) -> ByteAutomaton:
    """Make the automaton of a language.

    Raises:
      TooLarge: It would need too many states.
    """
    if weight(language) > MAX_EDGE_STATES:
        raise TooLarge(heaviest(language))
    builder = Builder(_restricted)
    start = builder.state()
    end = builder.add(language, start)
    try:
        return _determinised(builder, start, end)
    except TooLarge:
        raise TooLarge(heaviest(language)) from None


def _restricted(language: Restricted) -> ByteAutomaton:
    left, right = compile_language(language.body), compile_language(language.other)
    return both(left, right, is_negated=language.is_negated)


def both(
    left: ByteAutomaton,
    right: ByteAutomaton,
    max_states: int = MAX_STATES,
    *,
    is_negated: bool = False,
) -> ByteAutomaton:
    """The automaton of the texts that two automata accept.

    A negated `right` accepts the texts that it would refuse.

    Raises:
      TooLarge: It would need more than `max_states`.
    """
    pairs, class_of_byte = np.unique(
        np.stack([left.class_of_byte, right.class_of_byte]), axis=1, return_inverse=True
    )
    left_SC, right_SC = left.next_SC[:, pairs[0]].tolist(), right.next_SC[:, pairs[1]].tolist()

    def moves(state: tuple[int, int]) -> Iterator[tuple[int, int] | None]:
        for next_left, next_right in zip(left_SC[state[0]], right_SC[state[1]], strict=True):
            is_dead = next_left == DEAD or (next_right == DEAD and not is_negated)
            yield None if is_dead else (next_left, next_right)

    def accepts(state: tuple[int, int]) -> bool:
        is_accepted = right.is_accepting_S[state[1]] != is_negated
        return bool(left.is_accepting_S[state[0]] and is_accepted)

    return _explored((START, START), moves, accepts, class_of_byte.reshape(-1), max_states)


def multiples_of(step: int) -> ByteAutomaton:
    """The automaton of the decimal integers that are multiples of a positive integer.

    Raises:
      TooLarge: It would need too many states.
    """
    before_digits, after_sign = -2, -1
    class_of_byte = np.full(256, 11)
    class_of_byte[ord("0") : ord("9") + 1] = np.arange(10)
    class_of_byte[ord("-")] = 10

    def moves(remainder: int) -> Iterator[int | None]:
        yield from ((10 * max(remainder, 0) + digit) % step for digit in range(10))
        yield after_sign if remainder == before_digits else None
        yield None

    return _explored(before_digits, moves, lambda remainder: remainder == 0, class_of_byte)


def weight(language: Language) -> int:
    """An estimate, mostly too high, of the states that a language adds to an automaton."""
    match language:
        case Characters(ranges):
            return 1 if ranges and ranges[-1][1] < 0x80 else 8
        case Literal(text):
            return len(text.encode())
        case Compiled(automaton):
            return automaton.num_states
        case Repetition(_, least, most):
            each = 1 + sum(map(weight, children(language)))
            return (max(least, 1) if most is None else most) * each + 1
        case _:
            return 1 + sum(map(weight, children(language)))


def heaviest(language: Language) -> Origin | None:
    """The origin of the innermost part that makes more than a quarter of a language's weight."""
    limit, found = weight(language) // 4, None
    while weight(language) > limit:
        if (origin := getattr(language, "origin", None)) is not None:
            found = origin
        if not (parts := children(language)):
            break
        language = max(parts, key=weight)
    return found


def _determinised(builder: Builder, start: int, end: int) -> ByteAutomaton:
    edges, closures = builder.edges, _Closures(builder, end)
    cuts = sorted({0, 256} | {b for e in edges for low, high, _ in e for b in (low, high + 1)})
    lows = cuts[:-1]
    class_at = {low: number for number, low in enumerate(lows)}
    class_at[256] = len(lows)
    class_of_byte = np.searchsorted(np.array(lows), np.arange(256), side="right") - 1
    # each edge as the classes of its bytes
    spans = [[(class_at[low], class_at[high + 1], t) for low, high, t in e] for e in edges]

    def moves(state: tuple[int, ...]) -> Iterator[tuple[int, ...] | None]:
        found: list[set[int] | None] = [None] * len(lows)
        for member in state:
            for first, last, target in spans[member]:
                for byte_class in range(first, last):
                    if (targets := found[byte_class]) is None:
                        found[byte_class] = {target}
                    else:
                        targets.add(target)
        for targets in found:
            yield None if targets is None else closures.of(targets)

    return _explored(closures.of({start}), moves, lambda state: state[-1:] == (end,), class_of_byte)


class _Closures:
    """The states that sets of states lead to by edges without a byte, as sorted tuples.

    Only states with edges are kept, and the accepting one, which comes last.
    """

    def __init__(self, builder: Builder, end: int):
        self._builder, self._end = builder, end
        self._of_state: dict[int, frozenset[int]] = {}
        self._of_set: dict[frozenset[int], tuple[int, ...]] = {}
        self._num_members = 0

    def of(self, states: set[int]) -> tuple[int, ...]:
        key = frozenset(states)
        if (known := self._of_set.get(key)) is None:
            found = frozenset().union(*map(self._of, key))
            known = tuple(sorted(found - {self._end}))
            known += (self._end,) if self._end in found else ()
            self._count(len(known))
            self._of_set[key] = known
        return known

    def _of(self, state: int) -> frozenset[int]:
        if (known := self._of_state.get(state)) is None:
            seen, waiting = {state}, [state]
            while waiting:
                for target in self._builder.free[waiting.pop()]:
                    if target not in seen:
                        seen.add(target)
                        waiting.append(target)
            known = frozenset(s for s in seen if self._builder.edges[s] or s == self._end)
            self._of_state[state] = known
            self._count(len(seen))
        return known

    def _count(self, num_members: int) -> None:
        self._num_members += num_members
        if self._num_members > MAX_MEMBERS:
            raise TooLarge(None)


def _explored(
    first: State,
    moves: Callable[[State], Iterator[State | None]],
    accepts: Callable[[State], bool],
    class_of_byte: np.ndarray,
    max_states: int = MAX_STATES,
) -> ByteAutomaton:
    """The automaton of the states on the ways from `first` to states that accept.

    Args:
      first: The first state.
      moves: The next state of a state for each class of bytes; None for none.
      accepts: Whether a state accepts.
      class_of_byte: The class of each byte.
      max_states: The largest number of states.

    Raises:
      TooLarge: There are too many states.
    """
    numbers, order = {first: START}, [first]
    rows: list[Sequence[int]] = []
    for state in order:
        row = []
        for target in moves(state):
            if target is None:
                row.append(DEAD)
                continue
            number = numbers.get(target)
            if number is None:
                number = numbers[target] = len(order) + 1
                order.append(target)
                if number > max_states:
                    raise TooLarge(None)
            row.append(number)
        rows.append(row)
    next_SC = np.array([[DEAD] * len(rows[0]), *rows], np.int32)
    is_accepting_S = np.array([False, *map(accepts, order)])
    return _reduced(next_SC, class_of_byte, is_accepting_S)


def _reduced(
    next_SC: np.ndarray, class_of_byte: np.ndarray, is_accepting_S: np.ndarray
) -> ByteAutomaton:
    """The automaton without moves that cannot lead to acceptance, and without most equal states."""
    is_useful_S = np.isfinite(steps_to(is_accepting_S, next_SC))
    next_SC = np.where(is_useful_S[next_SC], next_SC, DEAD)
    for _ in range(MERGES):
        places: dict[bytes, int] = {}
        # the first state stays apart, as the others must not get its number
        rows = np.column_stack([next_SC, is_accepting_S, np.arange(len(next_SC)) == START])
        group_S = np.array([places.setdefault(row.tobytes(), s) for s, row in enumerate(rows)])
        kept = np.unique(group_S)
        if len(kept) == len(next_SC):
            break
        next_SC = np.searchsorted(kept, group_S)[next_SC[kept]]
        is_accepting_S = is_accepting_S[kept]
    columns, class_of_class = np.unique(next_SC, axis=1, return_inverse=True)
    byte_class = class_of_class.reshape(-1)[class_of_byte]
    return ByteAutomaton(columns.astype(np.int32), byte_class, is_accepting_S)


def steps_to(is_target_S: np.ndarray, next_SC: np.ndarray) -> np.ndarray:
    """The number of moves from each state to the nearest target; infinite where there is no way."""
    S = len(next_SC)
    targets = np.flatnonzero(is_target_S)
    if not len(targets):
        return np.full(S, np.inf)
    # moves of a state to the same next state count once
    sorted_SC = np.sort(next_SC, axis=1)
    is_first_SC = sorted_SC != DEAD
    is_first_SC[:, 1:] &= sorted_SC[:, 1:] != sorted_SC[:, :-1]
    moves = (sorted_SC[is_first_SC], np.nonzero(is_first_SC)[0])
    backwards = csr_array((np.ones(len(moves[0])), moves), shape=(S, S))
    return dijkstra(backwards, indices=targets, unweighted=True, min_only=True)
