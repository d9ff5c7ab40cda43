"""Chooses the shared prefixes to keep if the slots are too few for all, so that the fewest tokens
are computed.

Let the cost of a node, for a kept ancestor and a number k of slots, be the fewest tokens that are
computed for the users of the node if these begin at the end of the ancestor, and the ancestor and
everything after it has k slots. Either the node is kept: its tokens after the ancestor are computed
once, and its own users have k slots if it is the last user of the ancestor, in whose slot it
continues, and k - 1 slots if it is not. Or the node is dissolved: its users begin at the ancestor.
The choices for different children are independent, but for the one that may be the last user. So a
cheapest choice for a node consists of cheapest choices for its children (Bellman's principle of
optimality, "Dynamic Programming", 1957).

Knows nothing of grids, rows' tokens or queues.
"""

import math
from collections.abc import Sequence

from ...compile.grids.prefix_tree import PrefixNode, dissolve


def keep_best(root: PrefixNode, nodes: Sequence[PrefixNode], max_slots: int) -> list[PrefixNode]:
    """Dissolve nodes so that at most `max_slots` slots are needed and the fewest tokens computed.

    Args:
      root: The empty beginning, which no slot holds.
      nodes: All nodes of some of the root's trees, each after its parent; the others are dissolved.
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
        """Costs of a node by its kept ancestor: for each k, without and with the last user."""
        self._users: dict[PrefixNode, list[float]] = {}
        """Costs of the users of a node that is kept, for each k."""

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
        """The least cost of a node's users without a last user, and what a last user saves."""
        tokens = len(node.rows) * (node.length - start.length)
        costs = [self._cost[child, start][k] for child in node.children]
        cost = tokens + sum(without for without, _ in costs)
        return cost, min(0, min((with_last - without for without, with_last in costs), default=0))

    def _kept_cost(self, node: PrefixNode, start: PrefixNode, k: int) -> float:
        return node.length - start.length + self._users[node][k] if k > 0 else math.inf

    def _of_node(self, node: PrefixNode, start: PrefixNode, k: int) -> tuple[float, float]:
        """Costs of a node whose users may begin at `start`, without and with the last user."""
        dissolved, saved = self._of_users(node, start, k)
        if start is self._root:
            # no slot holds the empty beginning
            without = min(dissolved, self._kept_cost(node, start, k))
            return without, without
        without = min(dissolved, self._kept_cost(node, start, k - 1))
        return without, min(dissolved + saved, self._kept_cost(node, start, k), without)

    def _choose(self, top: PrefixNode, k: int, kept: set[PrefixNode]) -> None:
        """Add the nodes of a tree to `kept` that a least cost keeps."""
        stack = [(top, self._root, k, False)]
        while stack:
            node, start, k, may_be_last = stack.pop()
            is_root = start is self._root
            cost = self._cost[node, start][k][may_be_last]
            dissolved, saved = self._of_users(node, start, k)
            if cost == dissolved or (may_be_last and not is_root and cost == dissolved + saved):
                has_last = may_be_last and not is_root and cost != dissolved
                stack += self._with_last(node, start, k, has_last)
                continue
            kept.add(node)
            own = (
                k if is_root or (may_be_last and cost == self._kept_cost(node, start, k)) else k - 1
            )
            _, saved = self._of_users(node, node, own)
            stack += self._with_last(node, node, own, saved < 0)

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
