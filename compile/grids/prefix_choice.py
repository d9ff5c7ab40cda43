"""Chooses the prefixes that a plan keeps for groups of slots, from what the rows of a job share.

Rows in the order of a prefix table form a tree: its nodes are the runs of neighbours that share a
beginning. A prefix pays if enough rows begin with it, as a group of slots has one prefix at a time.
Among all sets of such prefixes, the chosen one saves most tokens of prefill. A best set for a node
is either the node's own beginning for all its rows, or best sets for the nodes below, with the
node's own beginning for the rows that are left.

Knows nothing of token ids, devices or seconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .prefix_grid import PlannedPrefix, PrefixGrid
from .prefix_table import PrefixTable


@dataclass(slots=True)
class _Node:
    """A run of rows, as places in the order of the table, that share a beginning."""

    length: int
    hash: str
    first: int
    end: int = 0
    num_rows: int = 0
    """The rows that are longer than the beginning."""
    saved: int = 0
    """The tokens that the best set of prefixes saves among these rows."""
    num_left: int = 0
    """The rows that begin with no prefix of the best set."""
    takes_all: bool = False
    """Whether the best set is the beginning of the node alone."""
    takes_rest: bool = False
    """Whether the beginning of the node is in the best set, for the rows that are left."""


def choose_prefixes(
    table: PrefixTable, prompt_lengths: np.ndarray, min_rows: int
) -> list[PlannedPrefix]:
    """The prefixes that save most prompt tokens, each the beginning of at least `min_rows` rows.

    Args:
      table: What the rows share.
      prompt_lengths: The length of each row's prompt.
      min_rows: The minimum number of rows of a prefix; at least 2.
    """
    nodes = list(_nodes(table, prompt_lengths, min_rows))
    chosen: list[PlannedPrefix] = []
    covered = len(table.rows)
    for node in reversed(nodes):
        # parents come before the nodes below them, which end where their parent does or earlier
        if node.first >= covered:
            continue
        if node.takes_all or node.takes_rest:
            chosen.append(PlannedPrefix(node.length, node.hash))
        if node.takes_all:
            covered = node.first
    return sorted(chosen)


def prefixes_of_rows(
    table: PrefixTable, prompt_lengths: np.ndarray, prefixes: PrefixGrid
) -> list[PlannedPrefix | None]:
    """The longest planned prefix of each row, as far as the table shows it."""
    known = frozenset(prefixes.shared)
    found: list[PlannedPrefix | None] = [None] * len(prompt_lengths)
    # a node comes after the nodes below it, so the longest prefix of a row is set last
    for node in reversed(list(_nodes(table, prompt_lengths, 2))):
        if (prefix := PlannedPrefix(node.length, node.hash)) in known:
            for row in table.rows[node.first : node.end].tolist():
                if prompt_lengths[row] > node.length:
                    found[row] = prefix
    return found


def _nodes(table: PrefixTable, prompt_lengths: np.ndarray, min_rows: int) -> Iterator[_Node]:
    """All nodes of the tree except the root, each after the nodes below it.

    This is the usual traversal of the intervals of a table of common prefixes (Abouelhoda, Kurtz
    and Ohlebusch, "Replacing suffix trees with enhanced suffix arrays", 2004, section 4.1).
    """
    hashes = table.hex_hashes()
    lengths = prompt_lengths[table.rows].tolist()
    stack = [_Node(0, "", 0)]
    for place, shared in enumerate([*table.shared[1:].tolist(), 0], start=1):
        below: _Node | None = None
        while stack[-1].length > shared:
            node = stack.pop()
            _add(node, below, lengths[place - 1])
            node.end = place
            _decide(node, min_rows)
            yield node
            below = node
        if stack[-1].length < shared:
            first = place - 1 if below is None else below.first
            stack.append(_Node(shared, hashes[place], first))
        _add(stack[-1], below, lengths[place - 1])


def _add(node: _Node, below: _Node | None, row_length: int) -> None:
    """Add a complete node below, or else the single row before the current place."""
    if below is not None:
        node.num_rows += below.num_rows
        node.saved += below.saved
        node.num_left += below.num_left
    elif row_length > node.length:
        node.num_rows += 1
        node.num_left += 1


def _decide(node: _Node, min_rows: int) -> None:
    """Choose the best set of a node whose rows and nodes below are complete."""
    of_rest = node.length * (node.num_left - 1) if node.num_left >= min_rows else 0
    of_all = node.length * (node.num_rows - 1) if node.num_rows >= min_rows else 0
    node.takes_all = of_all > 0 and of_all >= node.saved + of_rest
    node.takes_rest = not node.takes_all and of_rest > 0
    node.saved = max(of_all, node.saved + of_rest)
    if node.takes_all or node.takes_rest:
        node.num_left = 0


def own_lengths(
    prompt_lengths: Sequence[int], prefixes: Sequence[PlannedPrefix | None]
) -> list[int]:
    """The lengths of prompts after their prefixes."""
    return [
        length - (prefix.length if prefix else 0)
        for length, prefix in zip(prompt_lengths, prefixes, strict=True)
    ]
