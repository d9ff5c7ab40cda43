"""Chooses the shared prefixes to keep in few slots, so that the fewest tokens are computed.

Let cost(node, start, k) be the fewest tokens that are computed for the users of a node if they can
begin at the end of a kept ancestor `start`, and `start` and everything below it have k slots. The
users of a dissolved node begin at `start`. A kept node computes the tokens after `start` once. Its
users then have k - 1 slots, or k slots if it is the last user of `start`, in whose slot it
continues. Children choose independently, except that only one can be the last user. So a cheapest
choice for a node consists of cheapest choices for its children (Bellman's principle of optimality,
"Dynamic Programming", 1957).

Knows nothing of grids, rows' tokens or queues.
"""

import math
from collections.abc import Sequence

from ...compile.grids.prefix_tree import PrefixNode, dissolve


def keep_best(root: PrefixNode, nodes: Sequence[PrefixNode], max_slots: int) -> list[PrefixNode]:
    """Dissolve nodes so that at most `max_slots` slots are needed and the fewest tokens computed.

    Args:
      root: The empty beginning, which no slot holds.
      nodes: All nodes of some of the root's trees, each after its parent.
      max_slots: The number of slots; at least 1.

    Returns:
      The nodes that are kept, in the same order.
    """
    return _Search(root, nodes, max_slots).kept()


class _Search:
    """The costs of all nodes for all their ancestors, and the choice that they give."""

    def __init__(self, root: PrefixNode, nodes: Sequence[PrefixNode], max_slots: int):
        self._root, self._nodes, self._max_slots = root, nodes, max_slots
        self._cost: dict[tuple[PrefixNode, PrefixNode], list[tuple[float, float]]] = {}
        """By node and kept ancestor, for each k: the cost if no last user is at or below the node,
        and the cost if one may be."""
        self._users: dict[PrefixNode, list[float]] = {}
        """By kept node, for each k: the cost of its users."""

    def kept(self) -> list[PrefixNode]:
        """Dissolve all nodes that are not kept; return the others."""
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
