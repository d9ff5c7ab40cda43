"""The key of a graph: its kind, and the bucket or the span that it is compiled for.

Plans, executables, failures and costs name graphs by their keys. Knows nothing of what kinds there
are; `graph_kinds` has their table.
"""

from dataclasses import dataclass

from ..grids.prefill_bucket import PrefillBucket


@dataclass(frozen=True)
class GraphKey:
    """One graph of a grid. Its text is its name in files and messages, and is never parsed."""

    kind: str
    """The name of the kind, a key of `GRAPH_KINDS`."""
    shape: PrefillBucket | int | None = None
    """The bucket or the span of the graph; None for a kind of which a grid has one graph."""

    def __str__(self) -> str:
        """The name: `prefill 256x4`, `decode span 1024`, `fork`."""
        if self.shape is None:
            return self.kind
        return f"{self.kind} {'span ' if isinstance(self.shape, int) else ''}{self.shape}"


FORK = GraphKey("fork")
PREFIX = GraphKey("prefill prefix")
CLEAR_PREFIX = GraphKey("clear prefix")
EMPTY_STATE = GraphKey("empty state")
