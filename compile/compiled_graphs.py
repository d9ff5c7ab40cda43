"""The executables of a grid, called by key; a graph outside the grid is refused.

Knows nothing of requests, text or clocks. There is no fallback: nothing here compiles.
"""

from collections.abc import Mapping
from typing import Any

import jax

from ..modelzoo.errors import UserError
from .graphs.graph_kinds import EMPTY_STATE, GRAPH_KINDS, GraphKey
from .graphs.steps import DecodeState
from .grids.bucket_grid import BucketGrid


class GraphNotPlanned(UserError):
    """A call for a graph that the plan does not have."""


class CompiledGraphs:
    """The executables of one grid."""

    def __init__(self, grid: BucketGrid, executables: Mapping[GraphKey, jax.stages.Compiled]):
        self.grid = grid
        self.executables = executables

    def empty_state(self) -> DecodeState:
        """A new decode state without rows, on the devices."""
        return self.executable(EMPTY_STATE)()

    def call(
        self, key: GraphKey, parameters: Mapping[str, jax.Array], state: Any, *arguments: Any
    ) -> tuple[Any, Any]:
        """Call a graph. `state` is donated.

        Args:
          key: The graph.
          parameters: The parameters of the model, which only graphs that run it take.
          state: The decode state; None in a plan without one.
          *arguments: The graph's own arguments, as its body names them.

        Returns:
          The new state, and the output; None for a graph without output.

        Raises:
          GraphNotPlanned: The plan has no such graph.
        """
        kind, executable = GRAPH_KINDS[key.kind], self.executable(key)
        model = () if kind.call is None else (parameters,)
        if not kind.takes_state:
            return state, executable(*model, *arguments)
        return executable(*model, state, *arguments)

    def executable(self, key: GraphKey) -> Any:
        """The executable of a graph; raises `GraphNotPlanned` if there is none."""
        try:
            return self.executables[key]
        except KeyError:
            raise GraphNotPlanned(
                f"no graph {str(key)!r} in this plan; it has {sorted(map(str, self.executables))}. "
                f"Add the bucket to the plan and build again."
            ) from None
