"""Errors for refused graphs and compiler options, which name the plan's key to change.

Knows nothing of requests or files.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from .grids.bucket_grid import BucketGrid
from .grids.prefill_bucket import PrefillBucket


class GraphFailed(RuntimeError):
    """A graph that does not compile, does not fit into memory, or fails as it runs."""

    exit_code = 4

    def __init__(self, name: str, grid: BucketGrid, problem: str):
        super().__init__(f"graph {name!r} {problem}. {_advice(name, grid)}")
        self.name, self.grid, self.problem = name, grid, problem

    def __reduce__(self):
        """Pickle all arguments, so that a worker's error reaches its parent process."""
        return type(self), (self.name, self.grid, self.problem)


class CompilerOptionRefused(ValueError):
    """An option that the compiler does not know, or a value that it refuses."""

    exit_code = 2


@contextmanager
def naming_graph(name: str, grid: BucketGrid, what: str) -> Iterator[None]:
    """Turn an XLA error in this block into `GraphFailed`; `what` says how the graph failed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise GraphFailed(name, grid, f"{what}: {reason(error)}") from error


@contextmanager
def naming_option(graph: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Turn an XLA error about one of these options into `CompilerOptionRefused`."""
    try:
        yield
    except RuntimeError as error:
        # the longest name, because one name may be the beginning of another
        name = max((name for name in options if name in str(error)), key=len, default=None)
        if name is None or is_out_of_memory(error):
            raise
        raise CompilerOptionRefused(
            f"plan compiler.{graph.split()[0]}.{name}: expected an option and a value that the "
            f"target's compiler knows, got {options[name]!r} for graph {graph!r}: "
            f"{reason(error)}. Correct it, or remove it from the plan."
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host has no memory left."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def reason(error: BaseException) -> str:
    """The first line of an error; the other lines of XLA's errors are tables of buffers."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def bucket_of(name: str, grid: BucketGrid) -> PrefillBucket | None:
    """The prefill bucket of a graph, or None for other graphs."""
    return next((bucket for bucket in grid.prefill if name.endswith(f" {bucket}")), None)


def _advice(name: str, grid: BucketGrid) -> str:
    """The change to the plan that removes the graph or makes it smaller."""
    bucket, prefixes = bucket_of(name, grid), grid.prefixes
    if bucket is None and prefixes is not None:
        return (
            f"Change [prefixes], buckets.decode_slots ({grid.decode_slots}) or "
            f"buckets.decode_spans ({list(grid.decode_spans)}), as with --set "
            f"buckets.decode_slots={prefixes.groups}, or spread the model over more devices."
        )
    if bucket is None:
        also = " and buckets.span_slots" if grid.span_slots else ""
        return (
            f"Change buckets.decode_slots ({grid.decode_slots}){also} or buckets.decode_spans "
            f"({list(grid.decode_spans)}), as with --set buckets.decode_slots="
            f"{max(1, grid.decode_slots // 2)}, or spread the model over more devices."
        )
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
