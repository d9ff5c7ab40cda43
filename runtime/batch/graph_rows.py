"""Finds the rows of a job that need a graph, to name them if it does not compile.

Does not know about devices.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..console import plural
from ..errors import EXIT_BUILD, JobError
from ..rows.scan import RowRequirements, ScannedRow

if TYPE_CHECKING:
    from ...compile.grids.bucket_grid import BucketGrid

NUM_NAMED = 3


@contextmanager
def naming_rows(rows: Sequence[ScannedRow]) -> Iterator[None]:
    """Turn the failure of a graph into a JobError that names the rows that need the graph."""
    from ...compile.graph_failures import GraphFailed

    try:
        yield
    except GraphFailed as error:
        described = describe_rows(error.name, error.grid, rows)
        raise JobError(f"{error} {described}", EXIT_BUILD) from error


def describe_rows(name: str, grid: "BucketGrid", rows: Sequence[ScannedRow]) -> str:
    """A sentence with the number of rows that need the graph, and the first of them."""
    affected = [
        row
        for row in rows
        if row.requirements is not None and needs_graph(name, grid, row.requirements)
    ]
    named = [f"{row.custom_id!r} ({row.place})" for row in affected[:NUM_NAMED]]
    listed = f": {', '.join(named)}{', ...' * (len(affected) > NUM_NAMED)}" if named else ""
    return f"{len(affected)} of {plural(len(rows), 'row')} need it{listed}; none has run."


def needs_graph(name: str, grid: "BucketGrid", row: RowRequirements) -> bool:
    """Whether a row needs the graph, judged by its own requirements alone."""
    from ...compile.compiled_graphs import CompiledGraphs
    from ...compile.graph_failures import bucket_of
    from ...compile.grids.bucket_grid import NoBucketFits

    if row.text_lengths:
        longest = grid.prefill[-1].length
        fitting = (grid.bucket_of(length) for length in row.text_lengths if length <= longest)
        return any(CompiledGraphs.embed_name(bucket) == name for bucket in fitting)
    try:
        grid.fit(row.prompt_length, row.max_tokens)
    except NoBucketFits:
        return False
    spans = [span for span in grid.graph_spans if CompiledGraphs.decode_name(span) == name]
    if spans:
        shorter = max((span for span in grid.graph_spans if span < spans[0]), default=0)
        longest = grid.max_total_length(row.prompt_length, row.max_tokens)
        return row.max_tokens != 0 and row.prompt_length < spans[0] and shorter < longest
    if (bucket := bucket_of(name, grid)) is None:
        return row.n > 1 if name == CompiledGraphs.FORK else True
    is_kind = name == CompiledGraphs.prefill_name(bucket, row.prompt_logprobs is not None)
    return is_kind and bucket in grid.buckets_of(row.prompt_length)
