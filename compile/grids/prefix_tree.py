"""The tree of the beginnings that prompts share, cut as the grid cuts prompts into pieces.

Two rows can share a piece if all tokens up to its end are equal and their pieces up to there run in
the same graphs, because the cache entries of a piece depend on nothing else. The last piece of a
prompt is never shared, since it also makes the row's logits. A node of the tree is the end of a
piece at which rows or other nodes continue in several ways.

Knows nothing of token ids, slots' owners, devices or queues.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from .bucket_grid import BucketGrid
from .prefill_bucket import PrefillBucket
from .prefix_table import PrefixTable


@dataclass(eq=False, slots=True)
class PrefixNode:
    """A node of the tree: the end of a piece, and what continues from there."""

    length: int
    parent: "PrefixNode | None"
    bucket: PrefillBucket | None = None
    """The bucket of the piece."""
    rows: list[int] = field(default_factory=list)
    """The rows whose last shared piece ends here."""
    children: dict["PrefixNode", None] = field(default_factory=dict)
    """The nodes that continue from here, as the keys: one is removed in constant time."""
    next_by_bucket: dict[PrefillBucket | None, "PrefixNode"] = field(default_factory=dict)
    """Children that the next row may reach, by bucket; empty when the tree is complete."""
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
      table: What the rows share. Rows that are not in it share nothing and are left out, and so
        are rows whose prompts do not fit the grid.

    Returns:
      The root, which is the empty beginning, and all other nodes, each after its parent. Each has
      at least two users.
    """
    root = PrefixNode(0, None)
    open_nodes: list[PrefixNode] = []
    """Nodes that the next row may also begin with, shortest first."""
    closed: list[PrefixNode] = []
    shared = [*table.shared.tolist(), 0]
    for index, row in enumerate(table.rows.tolist()):
        _close(open_nodes, shared[index], closed)
        bound = min(max(shared[index], shared[index + 1]), prompt_lengths[row] - 1)
        if grid.computed_length(prompt_lengths[row]) > grid.prefill[-1].length:
            continue  # the row will be refused
        num_open = len(open_nodes)
        _add_row(root, row, grid, prompt_lengths[row], bound, open_nodes)
        if len(open_nodes) > num_open:
            open_nodes.sort(key=lambda node: node.length)
    _close(open_nodes, 0, closed)
    return root, closed[::-1]


def _add_row(
    root: PrefixNode,
    row: int,
    grid: BucketGrid,
    prompt_length: int,
    bound: int,
    open_nodes: list[PrefixNode],
) -> None:
    """Add a row to the node of its last piece up to `bound`; make the nodes that are missing."""
    node = root
    while True:
        bucket = grid.bucket_of(prompt_length, node.length)
        end = node.length + bucket.tokens
        if end > bound:
            break
        if (child := node.next_by_bucket.get(bucket)) is None:
            child = node.next_by_bucket[bucket] = PrefixNode(end, node, bucket)
            node.children[child] = None
            open_nodes.append(child)
        node = child
    node.rows.append(row)


def _close(open_nodes: list[PrefixNode], length: int, closed: list[PrefixNode]) -> None:
    """Move the nodes longer than `length` to `closed`, children first.

    A node with a single user is dissolved instead.
    """
    while open_nodes and open_nodes[-1].length > length:
        node = open_nodes.pop()
        assert node.parent is not None
        del node.parent.next_by_bucket[node.bucket]
        if node.num_users > 1:
            closed.append(node)
        else:
            dissolve(node, node.parent)


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
