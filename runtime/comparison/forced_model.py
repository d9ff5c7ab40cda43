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
from ..engine.model_runner import GraphCall, ModelRunner
from ..engine.padding import pack_greedy

if TYPE_CHECKING:
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
    used = {grid.bucket_of(length) for length in prompt_lengths}
    prefill = tuple(bucket for bucket in grid.prefill if bucket in used)
    spans = (grid.decode_spans[-1],)
    return replace(grid, prefill=prefill, decode_spans=spans, steps_per_call=1)


class ForcedModel:
    """A built model whose rows read given tokens, one token in each call.

    No call waits for another one: tokens are chosen and read on the devices.
    """

    def __init__(self, runner: ModelRunner, padded_vocab: int):
        self.runner = runner
        self._padded_vocab = padded_vocab

    def prefill(self, prompts: Sequence[Sequence[int]]) -> None:
        """Write prompts into the first slots, in order."""
        start, grid = 0, self.runner.grid
        while start < len(prompts):
            # a call has prompts of one bucket
            bucket = grid.bucket_of(len(prompts[start]))
            stop = start + 1
            while stop < min(start + bucket.batch, len(prompts)):
                if grid.bucket_of(len(prompts[stop])) != bucket:
                    break
                stop += 1
            rows = pack_greedy(prompts[start:stop], start, bucket, grid, self._padded_vocab)
            self.runner.call(GraphCall(GraphKey("prefill", bucket), rows))
            start = stop

    def read(self, forced_BV: jax.Array, is_live_B: np.ndarray) -> None:
        """Read the token that `forced_BV` chooses in each live slot."""
        self.runner.state = self.runner.decode_state._replace(logits_BV=forced_BV)
        key = GraphKey("decode", self.runner.grid.max_length)
        self.runner.call(GraphCall(key, (is_live_B,)))
