"""Finds the rows of a job that need a graph, to name them if it does not compile.

Does not know about devices.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from ..console import plural
from ..errors import EXIT_BUILD, JobError
from ..rows.scan import RowRequirements, ScannedRow

if TYPE_CHECKING:
    from ...compile.graphs.graph_kinds import GraphKey
    from ...compile.grids.bucket_grid import BucketGrid

NUM_NAMED = 3


@contextmanager
def naming_rows(rows: Sequence[ScannedRow]) -> Iterator[None]:
    """Turn the failure of a graph into a JobError that names the rows that need the graph."""
    from ...compile.graph_failures import GraphFailed

    try:
        yield
    except GraphFailed as error:
        described = describe_rows(error.key, error.grid, rows)
        raise JobError(f"{error} {described}", EXIT_BUILD) from error


def describe_rows(key: "GraphKey", grid: "BucketGrid", rows: Sequence[ScannedRow]) -> str:
    """A sentence with the number of rows that need the graph, and the first of them."""
    affected = [
        row
        for row in rows
        if row.requirements is not None and needs_graph(key, grid, row.requirements)
    ]
    named = [f"{row.custom_id!r} ({row.place})" for row in affected[:NUM_NAMED]]
    listed = f": {', '.join(named)}{', ...' * (len(affected) > NUM_NAMED)}" if named else ""
    return f"{len(affected)} of {plural(len(rows), 'row')} need it{listed}; none has run."


def needs_graph(key: "GraphKey", grid: "BucketGrid", row: RowRequirements) -> bool:
    """Whether a row needs the graph, judged by its own requirements alone."""
    from ...compile.graphs.graph_kinds import GRAPH_KINDS
    from ...compile.grids.bucket_grid import NoBucketFits
    from ...compile.grids.row_shape import RowShape

    shapes = [RowShape(length, 0) for length in row.text_lengths]
    if bool(shapes) != grid.embed:
        return False
    is_scored = row.prompt_logprobs is not None
    for shape in shapes or [RowShape(row.prompt_length, row.max_tokens, row.n, is_scored)]:
        with suppress(NoBucketFits):
            grid.fit(shape.prompt_length, shape.max_tokens)
            if GRAPH_KINDS[key.kind].serves(grid, key.shape, shape):
                return True
    return False
