"""Chooses the prefixes that groups of rows read together, from what the rows of a job share.

Rows in the order of a prefix table form a tree: its nodes are the runs of neighbours that share a
beginning. Each row begins with the longest chosen prefix that it has. A prefix pays if enough rows
begin with it, as the rows of a group have one prefix.

Whether the beginning of a node pays depends on the next shorter prefix that is chosen, the
*fallback* of its rows. The longer the fallback, the less they gain. So the largest number of tokens
that a node and the nodes below it save is a function of the fallback's length. Below a limit the
node is chosen, and the function is constant. From the limit on the node is not chosen, and the
function is the sum of those of the nodes below. The code keeps a function as a list of its steps.

Knows nothing of token ids, devices or seconds. Guarantees: every chosen prefix is the longest one
of at least the minimum number of rows; if the minimum is 2, no set of prefixes saves more tokens.
"""

import math
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from .bucket_grid import BucketGrid
from .prefix_grid import PlannedPrefix, PrefixGrid
from .prefix_table import PrefixTable

GROUPS = (1, 2, 4, 8, 16, 32)
"""The numbers of full groups of rows that are tried, for each part of the slots that has pages of
its own."""
MIN_FILLED = 1 / 2
"""The smallest number of rows of a planned prefix, as a share of the rows of a group."""


class _Step(NamedTuple):
    """A step of the function of saved tokens: at a length, its value jumps and its slope grows."""

    length: int
    num_rows: int
    """The rows that begin with the fallback from this length on: the increase of the slope."""
    jump: int


@dataclass(slots=True)
class _Node:
    """A run of rows, as places in the order of the table, that share a beginning.

    The tokens saved among these rows are a function of the length of their fallback. It is known
    from 0 up to the node's own length.
    """

    length: int
    hash: str
    first: int
    end: int = 0
    num_ends: int = 0
    """The rows that are no longer than the beginning."""
    saved: int = 0
    """The tokens saved with a fallback of length 0."""
    num_left: int = 0
    """The rows that begin with the fallback if its length is 0."""
    saved_at_end: int = 0
    """The tokens saved with a fallback of the node's length."""
    num_left_at_end: int = 0
    steps: list[_Step] = field(default_factory=list)
    """The steps of the function, by length."""
    limit: int = 0
    """The length of the shortest fallback with which the beginning is not chosen."""

    def add_row(self, length: int) -> None:
        """Add a row that is in no node below."""
        if length > self.length:
            self._add_rows(1)
        else:
            self.num_ends += 1

    def add(self, below: "_Node") -> None:
        """Add a complete node below."""
        below._shorten(self.length)
        self.saved += below.saved
        self.num_left += below.num_left
        self.saved_at_end += below.saved_at_end
        self.num_left_at_end += below.num_left_at_end
        fewer, self.steps = sorted((self.steps, below.steps), key=len)
        for step in fewer:
            insort(self.steps, step)

    def complete(self, min_rows: int) -> None:
        """Choose the beginning up to a limit, if that saves more and enough rows begin with it."""
        if self.num_left_at_end >= min_rows:
            self._choose(self.saved_at_end - self.length)
        self._add_rows(self.num_ends)

    def _add_rows(self, count: int) -> None:
        """Add rows that begin with the fallback."""
        self.num_left += count
        self.num_left_at_end += count
        self.saved_at_end += count * self.length

    def _shorten(self, length: int) -> None:
        """Reduce the function to lengths up to `length`."""
        end = self.length
        while self.steps and self.steps[-1].length > length:
            step = self.steps.pop()
            self.saved_at_end -= self.num_left_at_end * (end - step.length) + step.jump
            self.num_left_at_end -= step.num_rows
            end = step.length
        self.saved_at_end -= self.num_left_at_end * (end - length)

    def _choose(self, saved: int) -> None:
        """Replace the function by the constant `saved`, up to the length where it reaches this."""
        length, value, slope, num_passed = 0, self.saved, self.num_left, 0
        while value < saved:
            reached = length - (value - saved) // slope if slope else self.length + 1
            has_step = num_passed < len(self.steps)
            if not has_step or reached < self.steps[num_passed].length:
                value += slope * (reached - length)
                length = reached
                break
            step = self.steps[num_passed]
            value += slope * (step.length - length) + step.jump
            slope, length = slope + step.num_rows, step.length
            num_passed += 1
        if length:
            self.limit = length
            self.steps[:num_passed] = [_Step(length, slope, value - saved)]
            self.saved, self.num_left = saved, 0


def with_prefixes(
    grid: BucketGrid, table: PrefixTable, prompt_lengths: np.ndarray
) -> list[BucketGrid]:
    """The grid with planned prefixes, in groups of several sizes; none unless it is packed.

    Args:
      grid: A grid.
      table: What the rows share.
      prompt_lengths: The length of each row's prompt.
    """
    if not len(table.hashes) or not grid.chunks or grid.page is None:
        return []
    # a group reads whole pages of whole pieces
    step = math.lcm(grid.page, grid.chunks[-1])
    num_parts = grid.slot_groups or 1
    slots = grid.decode_slots // num_parts
    grids: dict[BucketGrid, None] = {}
    for number in GROUPS:
        rows = math.ceil(slots / number)
        chosen = choose_prefixes(table, prompt_lengths, max(2, math.ceil(MIN_FILLED * rows)))
        shared = tuple(prefix for prefix in chosen if prefix.length >= step)
        if not shared or (number > 1 and len(shared) < number):
            continue
        # the last group of each prefix may have few rows
        most = min(len(shared), number)
        groups = num_parts * (most + max(0, slots - most) // rows)
        length = max(prefix.length for prefix in shared) // grid.page * grid.page
        grids[replace(grid, prefixes=PrefixGrid(groups, rows, length, shared))] = None
    return list(grids)


def choose_prefixes(
    table: PrefixTable, prompt_lengths: np.ndarray, min_rows: int
) -> list[PlannedPrefix]:
    """The prefixes that save most prompt tokens, each with at least `min_rows` rows.

    Args:
      table: What the rows share.
      prompt_lengths: The length of each row's prompt.
      min_rows: The minimum number of rows of a prefix; at least 2.
    """
    chosen: list[PlannedPrefix] = []
    above: list[_Node] = []
    # parents come before the nodes below them, and the last nodes come first
    for node in reversed(list(_nodes(table, prompt_lengths, min_rows))):
        while above and above[-1].first > node.first:
            above.pop()
        if (above[-1].length if above else 0) < node.limit:
            chosen.append(PlannedPrefix(node.length, node.hash))
            above.append(node)
    return sorted(chosen)


def prefixes_of_rows(
    table: PrefixTable, prompt_lengths: np.ndarray, prefixes: PrefixGrid
) -> list[PlannedPrefix | None]:
    """The longest planned prefix of each row, as far as the table shows it.

    If the table has only some rows of another table, the other table is read, because these rows
    alone may not show where a prefix ends.
    """
    whole, taken = table.whole or table, table.taken
    if table.whole is None:
        taken = np.arange(len(prompt_lengths))
    # rows that were not taken get no prefix, as if they had no tokens
    size = 1 + max(taken.max(initial=-1), whole.rows.max(initial=-1))
    lengths = np.zeros(size, np.int64)
    lengths[taken] = prompt_lengths
    known = frozenset(prefixes.shared)
    found: list[PlannedPrefix | None] = [None] * len(lengths)
    # a node comes after the nodes below it, so the longest prefix of a row is set last
    for node in reversed(list(_nodes(whole, lengths, 2))):
        if (prefix := PlannedPrefix(node.length, node.hash)) in known:
            for row in whole.rows[node.first : node.end].tolist():
                if lengths[row] > node.length:
                    found[row] = prefix
    return [found[row] for row in taken.tolist()]


def _nodes(table: PrefixTable, prompt_lengths: np.ndarray, min_rows: int) -> Iterator[_Node]:
    """All nodes of the tree except the root, each after the nodes below it.

    This is the usual traversal of the intervals of a table of common prefixes (Abouelhoda, Kurtz
    and Ohlebusch, "Replacing suffix trees with enhanced suffix arrays", 2004, section 4.1).
    """
    if not len(table.rows):
        return
    hashes = table.hex_hashes()
    lengths = prompt_lengths[table.rows].tolist()
    stack = [_Node(0, "", 0)]
    for place, shared in enumerate([*table.shared[1:].tolist(), 0], start=1):
        below: _Node | None = None
        while stack[-1].length > shared:
            node = stack.pop()
            _add(node, below, lengths[place - 1])
            node.end = place
            node.complete(min_rows)
            yield node
            below = node
        if stack[-1].length < shared:
            first = place - 1 if below is None else below.first
            stack.append(_Node(shared, hashes[place], first))
        _add(stack[-1], below, lengths[place - 1])


def _add(node: _Node, below: _Node | None, row_length: int) -> None:
    """Add a complete node below, or else the single row before the current place."""
    if below is not None:
        node.add(below)
    else:
        node.add_row(row_length)
