"""Errors for refused graphs and compiler options, which name the plan's key to change.

Knows nothing of requests or files.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..modelzoo.errors import UserError
from .graphs.graph_kinds import GRAPH_KINDS, GraphKey
from .grids.bucket_grid import BucketGrid


class GraphFailed(RuntimeError):
    """A graph that does not compile, does not fit into memory, or fails as it runs."""

    exit_code = 4

    def __init__(self, key: GraphKey, grid: BucketGrid, problem: str):
        advice = GRAPH_KINDS[key.kind].advice(grid, key.shape)
        super().__init__(f"graph {str(key)!r} {problem}. {advice}")
        self.key, self.grid, self.problem = key, grid, problem

    def __reduce__(self):
        """Pickle all arguments, so that a worker's error reaches its parent process."""
        return type(self), (self.key, self.grid, self.problem)


class CompilerOptionRefused(UserError):
    """An option that the compiler does not know, or a value that it refuses."""

    exit_code = 2


@contextmanager
def naming_graph(key: GraphKey, grid: BucketGrid, what: str) -> Iterator[None]:
    """Turn an XLA error in this block into `GraphFailed`; `what` says how the graph failed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        raise GraphFailed(key, grid, f"{what}: {reason(error)}") from error


@contextmanager
def naming_option(key: GraphKey, options: Mapping[str, Any]) -> Iterator[None]:
    """Turn an XLA error about one of these options into `CompilerOptionRefused`."""
    try:
        yield
    except RuntimeError as error:
        # the longest name, because one name may be the beginning of another
        name = max((name for name in options if name in str(error)), key=len, default=None)
        if name is None or is_out_of_memory(error):
            raise
        table = GRAPH_KINDS[key.kind].options
        raise CompilerOptionRefused(
            f"plan compiler.{table}.{name}: expected an option and a value that the target's "
            f"compiler knows, got {options[name]!r} for graph {str(key)!r}: "
            f"{reason(error)}. Correct it, or remove it from the plan."
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device or the host has no memory left."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)


def reason(error: BaseException) -> str:
    """The first line of an error; the other lines of XLA's errors are tables of buffers."""
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
