"""Decides which beginnings of prompts are computed once, and in which order rows then run.

A shared prefix is kept in a slot of its own while rows begin with it. Rows run in depth-first
order of the tree of prefixes. A prefix that is the last user of its parent continues in the
parent's slot. If the last user is always the prefix that needs most slots, a tree of n nodes needs
at most log2(n) + 1 slots, like the registers of an expression (Ershov, "On programming of
arithmetic operations", 1958; Sethi and Ullman, "The generation of optimal code for arithmetic
expressions", 1970).

If a tree needs more slots than there are, `PrefixSearch` chooses the prefixes to keep. Rows of a
prefix that is not kept compute its tokens themselves.

Other rows are submitted longest first, so that the end of a job is short. The simulator submits
rows in the same order.

Knows nothing of token ids, devices or queues. Guarantees: the pieces of a row and their graphs stay
the same; every row is in the order exactly once.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.prefix_choice import prefixes_of_rows
from ...compile.grids.prefix_grid import PlannedPrefix
from ...compile.grids.prefix_table import PrefixTable
from ...compile.grids.prefix_tree import PrefixNode, count_slots, dissolve, prefix_tree

RowLengths = tuple[int, int | None]
"""The tokens of a prompt, and the maximum number of output tokens; None for no limit."""

SLOTS_PER_PREFIX = 8
"""At most one in this many slots holds a prefix; with fewer slots, one may.

At least one slot that can hold the longest row holds no prefix.
"""


@dataclass(frozen=True, eq=False)
class SharedPrefix:
    """The beginning of several prompts, which is computed once."""

    length: int
    """The number of tokens. Unit: tokens."""
    parent: "SharedPrefix | None"
    """The prefix from which this one continues."""
    is_last: bool
    """Whether it is the last user of its parent, in whose slot it then continues."""
    max_length: int
    """The length of the longest prefix that is held in its slot. Unit: tokens."""
    num_slots: int
    """The largest number of slots that it and the prefixes after it hold at one time."""

    @property
    def path(self) -> list["SharedPrefix"]:
        """The prefixes that it consists of, shortest first."""
        path: list[SharedPrefix] = []
        prefix = self
        while prefix is not None:
            path.append(prefix)
            prefix = prefix.parent
        return path[::-1]


def max_held_slots(grid: BucketGrid) -> int:
    """The maximum number of slots that hold prefixes."""
    # at least one slot must be left for rows, and pages for one row
    assert grid.pages is not None
    num_rows = grid.pages // (grid.slot_groups or 1) // grid.num_pages(grid.max_length)
    return min(grid.decode_slots // SLOTS_PER_PREFIX or 1, grid.decode_slots - 1, num_rows - 1)


@dataclass(frozen=True)
class Submission:
    """The order in which rows are submitted, and the prefix with which each one begins."""

    rows: list[int]
    prefixes: list[SharedPrefix | None]
    num_held: int = 0
    """The number of slots that may hold prefixes at one time."""
    planned: Sequence[PlannedPrefix | None] = ()
    """In a plan with prefixes, the prefix of each row, in the order of `rows`."""


def plan_submission(
    lengths: Sequence[RowLengths],
    table: PrefixTable,
    grid: BucketGrid | None = None,
    *,
    shares: bool = True,
) -> Submission:
    """Choose the prefixes to keep, and the order of rows.

    Rows keep the order of `submission_order`, except that the rows of a tree come right after the
    first row of the tree.

    Args:
      lengths: The lengths of each row.
      table: What the rows share.
      grid: The grid; without one, nothing is shared.
      shares: Whether rows may share prefixes.
    """
    order, planned = submission_order(lengths), list[PlannedPrefix | None]()
    if grid is not None and grid.prefixes is not None:
        prompt_lengths = np.array([prompt_length for prompt_length, _ in lengths], np.int64)
        planned = prefixes_of_rows(table, prompt_lengths, grid.prefixes)
        order = _by_planned_prefix(order, planned)

    def submission(
        rows: list[int], prefixes: list[SharedPrefix | None], num_held: int = 0
    ) -> Submission:
        return Submission(rows, prefixes, num_held, planned and [planned[row] for row in rows])

    without_prefixes = submission(order, [None] * len(order))
    if grid is None or not grid.chunks or not (shares and table.shares):
        return without_prefixes
    if (max_slots := max_held_slots(grid)) < 1:
        return without_prefixes
    root, nodes = prefix_tree(grid, [prompt_length for prompt_length, _ in lengths], table)
    count_slots(nodes)
    too_large = _nodes_of(nodes, {n for n in root.children if n.num_slots > max_slots})
    if too_large:
        dissolved = set(too_large).difference(PrefixSearch(root, too_large, max_slots).kept())
        nodes = [node for node in nodes if node not in dissolved]
        count_slots(nodes)
    place = np.empty(len(order), np.int64)
    place[np.asarray(order, np.int64)] = np.arange(len(order))
    first_place = _first_places(nodes, place)
    tree_at = {first_place[node]: node for node in root.children}
    in_tree = {row for node in nodes for row in node.rows}
    rows: list[int] = []
    prefixes: list[SharedPrefix | None] = []
    for index, row in enumerate(order):
        if (node := tree_at.get(index)) is not None:
            for tree_row, prefix in _depth_first(node, place, first_place):
                rows.append(tree_row)
                prefixes.append(prefix)
        elif row not in in_tree:
            rows.append(row)
            prefixes.append(None)
    return submission(rows, prefixes, min(max_slots, len(nodes)))


def _by_planned_prefix(order: list[int], planned: Sequence[PlannedPrefix | None]) -> list[int]:
    """The order of rows, with those of a planned prefix together; that of most rows comes first."""
    num_rows, first = Counter(planned), dict[PlannedPrefix | None, int]()
    for place, row in enumerate(order):
        first.setdefault(planned[row], place)
    return sorted(order, key=lambda row: (-num_rows[planned[row]], first[planned[row]]))


def _first_places(nodes: Sequence[PrefixNode], place: np.ndarray) -> dict[PrefixNode, int]:
    """For each node, the earliest place of a row at or below it."""
    first: dict[PrefixNode, int] = {}
    for node in reversed(nodes):
        own = [int(place[row]) for row in node.rows]
        first[node] = min(own + [first[child] for child in node.children])
    return first


def _depth_first(
    top: PrefixNode, place: np.ndarray, first_place: dict[PrefixNode, int]
) -> list[tuple[int, SharedPrefix]]:
    """The rows at and below a node, each with its prefix."""
    result: list[tuple[int, SharedPrefix]] = []
    stack: list[tuple[PrefixNode, SharedPrefix | None, bool]] = [(top, None, False)]
    while stack:
        node, parent, is_last = stack.pop()
        children = list(node.children)
        prefix = SharedPrefix(node.length, parent, is_last, _longest(node), node.num_slots)
        result += [(row, prefix) for row in sorted(node.rows, key=place.__getitem__)]
        # the last child needs most slots
        stack += [(child, prefix, True) for child in children[-1:]]
        others = sorted(children[:-1], key=first_place.__getitem__, reverse=True)
        stack += [(child, prefix, False) for child in others]
    return result


def _longest(node: PrefixNode) -> int:
    """The length of the last prefix that continues in the slot of a node."""
    while node.children:
        node = next(reversed(node.children))
    return node.length


def _nodes_of(nodes: Sequence[PrefixNode], tops: set[PrefixNode]) -> list[PrefixNode]:
    """The nodes of some trees, given by their top nodes; each node is after its parent."""
    chosen = set(tops)
    for node in nodes:
        if node.parent in chosen:
            chosen.add(node)
    return [node for node in nodes if node in chosen]


def submission_order(rows: Sequence[RowLengths]) -> list[int]:
    """Indices of rows, longest maximum length first; rows without a limit count as the longest."""
    limits = [math.inf if limit is None else length + limit for length, limit in rows]
    return sorted(range(len(rows)), key=lambda row: -limits[row])


class PrefixSearch:
    """Dissolves nodes so that at most `max_slots` slots are needed and the fewest tokens computed.

    It has the costs of all nodes for all their ancestors, and the choice that they give.

    Let cost(node, start, k) be the fewest tokens that are computed for the users of a node if they
    can begin at the end of a kept ancestor `start`, and `start` and everything below it have k
    slots. The users of a dissolved node begin at `start`. A kept node computes the tokens after
    `start` once. Its users then have k - 1 slots, or k slots if it is the last user of `start`, in
    whose slot it continues. Children choose independently, except that only one can be the last
    user. So a cheapest choice for a node consists of cheapest choices for its children (Bellman's
    principle of optimality, "Dynamic Programming", 1957).

    Args:
      root: The empty beginning, which no slot holds.
      nodes: All nodes of some of the root's trees, each after its parent.
      max_slots: The number of slots; at least 1.
    """

    def __init__(self, root: PrefixNode, nodes: Sequence[PrefixNode], max_slots: int):
        self._root, self._nodes, self._max_slots = root, nodes, max_slots
        self._cost: dict[tuple[PrefixNode, PrefixNode], list[tuple[float, float]]] = {}
        """By node and kept ancestor, for each k: the cost if no last user is at or below the node,
        and the cost if one may be."""
        self._users: dict[PrefixNode, list[float]] = {}
        """By kept node, for each k: the cost of its users."""

    def kept(self) -> list[PrefixNode]:
        """Dissolve all nodes that are not kept; return the others in the same order."""
        for node in reversed(self._nodes):
            self._users[node] = [math.inf] + [
                sum(self._of_users(node, node, k)) for k in range(1, self._max_slots + 1)
            ]
            ancestor = node.parent
            while ancestor is not None:
                self._cost[node, ancestor] = [
                    self._of_node(node, ancestor, k) for k in range(self._max_slots + 1)
                ]
                ancestor = ancestor.parent
        kept: set[PrefixNode] = set()
        for node in self._nodes:
            if node.parent is self._root:
                self._choose(node, self._max_slots, kept)
        for node in reversed(self._nodes):
            if node not in kept:
                assert node.parent is not None
                dissolve(node, node.parent)
        return [node for node in self._nodes if node in kept]

    def _of_users(self, node: PrefixNode, start: PrefixNode, k: int) -> tuple[float, float]:
        """The least cost without a last user, and the change, at most 0, that one makes."""
        tokens = len(node.rows) * (node.length - start.length)
        costs = [self._cost[child, start][k] for child in node.children]
        cost = tokens + sum(without for without, _ in costs)
        return cost, min(0, min((with_last - without for without, with_last in costs), default=0))

    def _kept_cost(self, node: PrefixNode, start: PrefixNode, k: int) -> float:
        return node.length - start.length + self._users[node][k] if k > 0 else math.inf

    def _of_node(self, node: PrefixNode, start: PrefixNode, k: int) -> tuple[float, float]:
        """Costs of a node whose users may begin at `start`, without and with the last user."""
        dissolved, change = self._of_users(node, start, k)
        if start is self._root:
            # no slot holds the empty beginning
            without = min(dissolved, self._kept_cost(node, start, k))
            return without, without
        without = min(dissolved, self._kept_cost(node, start, k - 1))
        return without, min(dissolved + change, self._kept_cost(node, start, k), without)

    def _choose(self, top: PrefixNode, k: int, kept: set[PrefixNode]) -> None:
        """Add the nodes of a tree to `kept` that a least cost keeps."""
        stack = [(top, self._root, k, False)]
        while stack:
            node, start, k, may_be_last = stack.pop()
            is_root = start is self._root
            cost = self._cost[node, start][k][may_be_last]
            dissolved, change = self._of_users(node, start, k)
            if cost == dissolved or (may_be_last and not is_root and cost == dissolved + change):
                has_last = may_be_last and not is_root and cost != dissolved
                stack += self._with_last(node, start, k, has_last)
                continue
            kept.add(node)
            own = (
                k if is_root or (may_be_last and cost == self._kept_cost(node, start, k)) else k - 1
            )
            _, change = self._of_users(node, node, own)
            stack += self._with_last(node, node, own, change < 0)

    def _with_last(
        self, node: PrefixNode, start: PrefixNode, k: int, has_last: bool
    ) -> list[tuple[PrefixNode, PrefixNode, int, bool]]:
        """The children with their start; one of them may hold the last user."""
        best = None
        if has_last:
            best = min(
                node.children,
                key=lambda child: self._cost[child, start][k][1] - self._cost[child, start][k][0],
            )
        return [(child, start, k, child is best) for child in node.children]
