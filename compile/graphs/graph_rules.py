"""Rules of `GRAPH_KINDS`: the rows that need a graph, and the changes to a plan if it fails.

Every rule gets the grid and the shape of the graph. Knows nothing of requests, files or devices.
"""

from ..grids.bucket_grid import BucketGrid
from ..grids.default_grid import RowShape
from ..grids.prefill_bucket import PrefillBucket


def prefills_in(grid: BucketGrid, bucket: PrefillBucket, row: RowShape) -> bool:
    """Whether a piece of the row's prompt, which is not scored, runs in a bucket."""
    return not row.is_scored and bucket in grid.buckets_of(row.prompt_length)


def scores_in(grid: BucketGrid, bucket: PrefillBucket, row: RowShape) -> bool:
    """Whether a piece of the row's prompt is scored in a bucket."""
    return row.is_scored and bucket in grid.buckets_of(row.prompt_length)


def decodes_in(grid: BucketGrid, span: int, row: RowShape) -> bool:
    """Whether the row has a length at which it is decoded in a span."""
    shorter = max((other for other in grid.graph_spans if other < span), default=0)
    longest = grid.max_total_length(row.prompt_length, row.max_tokens)
    return row.max_tokens != 0 and row.prompt_length < span and shorter < longest


def change_bucket(grid: BucketGrid, bucket: PrefillBucket) -> str:
    """The changes that make the graphs of a bucket smaller, or remove them."""
    entries = grid.to_table()["prefill"]
    fewer = [
        [length, *(max(1, batch // 2) if length == bucket.length else batch for batch in batches)]
        for length, *batches in entries
    ]
    others = [entry for entry in entries if entry[0] != bucket.length]
    ways = [f"give it fewer rows with --set 'buckets.prefill={fewer}'"] if fewer != entries else []
    if not grid.chunks and bucket != grid.prefill[-1]:
        ways.append(f"leave it to the next longer one with --set 'buckets.prefill={others}'")
    ways = ways or ["spread the model over more devices, or take shorter rows"]
    return f"Change the bucket {bucket}: {', or '.join(ways)}."


def change_slots(grid: BucketGrid, _: object) -> str:
    """The changes that make graphs of slots smaller."""
    slots, fewer = grid.decode_slots, max(1, grid.decode_slots // 2)
    keys = f"buckets.decode_slots ({slots}){' and buckets.span_slots' if grid.span_slots else ''}"
    if (prefixes := grid.prefixes) is not None:
        keys, fewer = f"[prefixes], buckets.decode_slots ({slots})", prefixes.groups
    return (
        f"Change {keys} or buckets.decode_spans ({list(grid.decode_spans)}), as with --set "
        f"buckets.decode_slots={fewer}, or spread the model over more devices."
    )
