"""A model whose rows read given tokens: prompts in prefill, then one token of each row at a time.

It runs the graphs of a plan, as a job does, so that every number of the plan has its effect:
formats of weights, of activations and of the cache. Does not know about statistics.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import numpy as np

from ...compile.graphs.graph_kinds import GraphKey
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.default_grid import ladder_grid
from ...compile.grids.grid_defaults import GridDefaults, round_up
from ...compile.grids.prefill_bucket import PrefillBucket
from ...compile.plan import Plan
from .. import session
from ..devices.graph_memory import check_memory
from ..devices.host_arrays import HostArrays
from ..engine.padding import pack_greedy

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...compile.build import BuildProgress
    from ...sharding.layout import Layout


def forced_grid(
    prompt_lengths: Sequence[int], max_length: int, slots: int, layout: "Layout | None"
) -> BucketGrid:
    """The grid of models that are compared.

    Args:
      prompt_lengths: The lengths of all prompts.
      max_length: The longest row, prompt and answer together.
      slots: The number of rows that run at once.
      layout: The layout of the models.
    """
    defaults = GridDefaults.for_layout(layout)
    # a grid has the lengths and spans that the layout divides, which must not be shorter than rows
    max_length = round_up(max_length, math.lcm(defaults.length_multiple, defaults.span_multiple))
    grid = ladder_grid(max_length, slots, score=False, defaults=defaults)
    used = {smallest_bucket(grid, length) for length in prompt_lengths}
    prefill = tuple(bucket for bucket in grid.prefill if bucket in used)
    spans = (grid.decode_spans[-1],)
    return replace(grid, prefill=prefill, decode_spans=spans, steps_per_call=1)


def smallest_bucket(grid: BucketGrid, length: int) -> PrefillBucket:
    """The smallest prefill bucket for a prompt."""
    return next(bucket for bucket in grid.prefill if bucket.length >= length)


class ForcedModel:
    """The parameters, the graphs and the decode state of a model."""

    def __init__(
        self,
        model: session.LoadedModel,
        plan: Plan,
        on_graph: "Callable[[BuildProgress], None]" = lambda built: None,
    ):
        """Compile the graphs of a plan with one decode step for each call."""
        definition, placement = model.definition, model.placement
        self._parameters, self._grid = model.parameters, plan.buckets
        self._padded_vocab = definition.padded_vocab
        self._graphs = session.compile_plan(definition, plan, placement, on_graph)
        check_memory(self._graphs, model.target.devices)
        self.host = HostArrays(placement.replicated)
        self.state = self._graphs.empty_state()

    @property
    def logits_BV(self) -> jax.Array:
        """Float32 logits of the next token of each slot, on the device."""
        return self.state.logits_BV

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Write prompts into the first slots, in order."""
        start = 0
        while start < len(prompts):
            # a call has prompts of one bucket
            bucket = smallest_bucket(self._grid, len(prompts[start]))
            stop = start + 1
            while stop < min(start + bucket.batch, len(prompts)):
                if smallest_bucket(self._grid, len(prompts[stop])) != bucket:
                    break
                stop += 1
            rows = pack_greedy(prompts[start:stop], start, bucket, self._grid, self._padded_vocab)
            arguments = self.host.put(rows)
            key = GraphKey("prefill", bucket)
            self.state, _ = self._graphs.call(key, self._parameters, self.state, *arguments)
            start = stop

    def read(self, forced_BV: jax.Array, is_live_B: np.ndarray) -> None:
        """Read the token that `forced_BV` chooses in each live slot."""
        state = self.state._replace(logits_BV=forced_BV)
        key, live_B = GraphKey("decode", self._grid.max_length), self.host.put(is_live_B)
        self.state, _ = self._graphs.call(key, self._parameters, state, live_B)
