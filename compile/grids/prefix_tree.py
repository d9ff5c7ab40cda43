"""The tree of the beginnings that prompts share, cut as the grid cuts prompts into pieces.

Two rows can share a piece if all tokens up to its end are equal and their pieces up to there run in
the same graphs, because the cache entries of a piece depend on nothing else. The last piece of a
prompt is never shared, since it also makes the row's logits. A node of the tree is the end of a
piece at which rows or other nodes continue in several ways.

Knows nothing of token ids, slots' owners, devices or queues.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .bucket_grid import BucketGrid, PrefillBucket
from .prefix_table import PrefixTable


@dataclass(eq=False)
class PrefixNode:
    """A node of the tree: the end of a piece, and what continues from there."""

    length: int
    parent: "PrefixNode | None"
    rows: list[int] = field(default_factory=list)
    """The rows whose last shared piece ends here."""
    children: dict["PrefixNode", None] = field(default_factory=dict)
    """The nodes that continue from here, as the keys: one is removed in constant time."""
    by_bucket: dict[PrefillBucket, "PrefixNode"] = field(default_factory=dict)
    """The nodes at which the rows that are added next may continue."""
    num_slots: int = 0
    """The slots that the node and its children need at one time."""

    @property
    def num_users(self) -> int:
        """The rows and nodes that continue from here."""
        return len(self.rows) + len(self.children)


def prefix_tree(
    grid: BucketGrid, prompt_lengths: Sequence[int], table: PrefixTable
) -> tuple[PrefixNode, list[PrefixNode]]:
    """The tree of the prompts.

    Args:
      grid: The grid, which cuts prompts into pieces.
      prompt_lengths: The length of each row's prompt.
      table: What the rows share; rows that are not in it share nothing and are left out.

    Returns:
      The root, which is the empty beginning, and all other nodes, each after its parent.
    """
    root = PrefixNode(0, None)
    nodes: list[PrefixNode] = []
    open_nodes: list[PrefixNode] = []
    """Nodes whose tokens the next row may have; each has the bucket of its last piece."""
    buckets: list[PrefillBucket] = []
    shared = [*table.shared.tolist(), 0]
    for index, row in enumerate(table.rows.tolist()):
        while open_nodes and open_nodes[-1].length > shared[index]:
            node, bucket = open_nodes.pop(), buckets.pop()
            if node.parent is not None:
                node.parent.by_bucket.pop(bucket, None)
        node, length = root, prompt_lengths[row]
        bound = max(shared[index], shared[index + 1])
        new: list[tuple[PrefixNode, PrefillBucket]] = []
        while True:
            bucket = grid.bucket_of(length, node.length)
            end = node.length + bucket.tokens
            if end > bound or end >= length:
                break
            if (child := node.by_bucket.get(bucket)) is None:
                child = node.by_bucket[bucket] = PrefixNode(end, node)
                node.children[child] = None
                nodes.append(child)
                new.append((child, bucket))
            node = child
        node.rows.append(row)
        if new:
            merged = sorted([*zip(open_nodes, buckets, strict=True), *new], key=_length_of)
            open_nodes, buckets = [n for n, _ in merged], [b for _, b in merged]
    return root, _without_single_users(nodes)


def _length_of(item: tuple[PrefixNode, PrefillBucket]) -> int:
    return item[0].length


def _without_single_users(nodes: list[PrefixNode]) -> list[PrefixNode]:
    """The nodes that several rows or nodes continue from; the users of others move to the parent,
    and a node with one child becomes one with it."""
    kept = []
    for node in reversed(nodes):
        parent = node.parent
        assert parent is not None
        node.by_bucket.clear()
        if node.num_users > 1:
            kept.append(node)
            continue
        dissolve(node, parent)
    return kept[::-1]


def dissolve(node: PrefixNode, parent: PrefixNode) -> None:
    """Let the users of a node continue from its parent."""
    del parent.children[node]
    parent.children |= node.children
    parent.rows += node.rows
    for child in node.children:
        child.parent = parent


def count_slots(nodes: Sequence[PrefixNode]) -> None:
    """Set `num_slots` of nodes, which are given after their parents, and sort their children."""
    for node in reversed(nodes):
        node.children = dict.fromkeys(sorted(node.children, key=lambda child: child.num_slots))
        *others, last = [0, 0, *(child.num_slots for child in node.children)]
        node.num_slots = max(1, last, *(1 + count for count in others if count))
