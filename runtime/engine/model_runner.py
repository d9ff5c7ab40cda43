"""The executables, the parameters and the state of a model on its devices.

The engine and the comparison of models both call graphs through it. Does not know which call comes
next, or what it is for. Guarantees: nothing compiles, as the executables are given; all transfers
are explicit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from ...compile.compiled_graphs import CompiledGraphs
from ...compile.graphs.graph_kinds import GraphKey
from ...compile.graphs.steps import DecodeState
from ...compile.grids.bucket_grid import BucketGrid
from ..devices.host_arrays import HostArrays


class GraphCall(NamedTuple):
    """A call of a graph, without the parameters and the state."""

    key: GraphKey
    arguments: tuple[Any, ...]
    """Arrays on the host."""
    on_devices: tuple[Any, ...] = ()
    """Arguments that are on the devices already; they come after the others."""


@dataclass
class ModelRunner:
    """Calls the graphs of a plan on the decode state."""

    graphs: CompiledGraphs
    parameters: Mapping[str, jax.Array]
    """The model's parameters on the devices, by dotted path."""
    host: HostArrays
    state: DecodeState | None = None
    """The decode state, which calls donate; None in a plan without one."""

    @property
    def grid(self) -> BucketGrid:
        """The buckets, slots and pages of the plan."""
        return self.graphs.grid

    @property
    def decode_state(self) -> DecodeState:
        """The decode state of a plan that has one."""
        assert self.state is not None
        return self.state

    def call(self, call: GraphCall) -> Any:
        """Start a graph, and return its output, for which the host has not waited."""
        arguments = (*self.host.put(call.arguments), *call.on_devices)
        self.state, output = self.graphs.call(call.key, self.parameters, self.state, *arguments)
        return output

    def reset(self) -> None:
        """Make the state empty; valid after an interrupted call too."""
        if self.state is not None:
            # an interrupted call may have donated the state without returning a new one
            for buffer in jax.tree.leaves(self.state):
                buffer.delete()
            self.state = self.graphs.empty_state()
