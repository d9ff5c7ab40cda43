"""The executables of a grid, called by name of their bucket; a shape outside the grid is refused.

Knows nothing of requests, text or clocks. There is no fallback: nothing here can compile.
"""

from collections.abc import Mapping
from typing import Any

import jax

from ..modelzoo.sampling import SamplingState, TokenScores
from .bucket_grid import BucketGrid, PrefillBucket
from .steps import DecodeOutput, DecodeState, Prompts

Parameters = Mapping[str, jax.Array]


class GraphNotPlanned(ValueError):
    """A call for a graph that the plan does not have."""


class CompiledGraphs:
    """Prefill, score, insert and decode executables of one grid."""

    def __init__(self, grid: BucketGrid, executables: Mapping[str, jax.stages.Compiled]):
        self.grid = grid
        self._executables = dict(executables)

    @staticmethod
    def prefill_name(bucket: PrefillBucket) -> str:
        return f"prefill {bucket.length}x{bucket.batch}"

    @staticmethod
    def score_name(bucket: PrefillBucket) -> str:
        return f"score {bucket.length}x{bucket.batch}"

    @staticmethod
    def insert_name(bucket: PrefillBucket) -> str:
        return f"insert {bucket.length}x{bucket.batch}"

    @staticmethod
    def decode_name(span: int) -> str:
        return f"decode span {span}"

    def prefill(
        self,
        parameters: Parameters,
        bucket: PrefillBucket,
        tokens_BT: jax.Array,
        true_length_B: jax.Array,
    ) -> Prompts:
        """Run a batch of prompts of one bucket."""
        graph = self.executable(self.prefill_name(bucket))
        return graph(parameters, tokens_BT, true_length_B)

    def score(
        self,
        parameters: Parameters,
        bucket: PrefillBucket,
        tokens_BT: jax.Array,
        true_length_B: jax.Array,
        num_logprobs_B: jax.Array,
    ) -> tuple[Prompts, TokenScores]:
        """Run a batch of prompts of one bucket and score their tokens."""
        graph = self.executable(self.score_name(bucket))
        return graph(parameters, tokens_BT, true_length_B, num_logprobs_B)

    def insert(
        self,
        state: DecodeState,
        bucket: PrefillBucket,
        prompts: Prompts,
        row: jax.Array,
        slot: jax.Array,
        limit_1: jax.Array,
        sampling: SamplingState,
    ) -> DecodeState:
        """Give a slot to one row of a prefill. `state` is donated."""
        graph = self.executable(self.insert_name(bucket))
        return graph(state, prompts, row, slot, limit_1, sampling)

    def decode(
        self, parameters: Parameters, state: DecodeState, is_live_B: jax.Array, span: int
    ) -> tuple[DecodeState, DecodeOutput]:
        """Several steps for the live rows over `span` cache positions. `state` is donated."""
        graph = self.executable(self.decode_name(span))
        num_segments = self.grid.decode_spans.index(span) + 1
        head = state._replace(cache=state.cache.head(num_segments))
        new, output = graph(parameters, head, is_live_B)
        return new._replace(cache=state.cache.with_head(new.cache)), output

    def executable(self, name: str) -> Any:
        """The executable of that name, or `GraphNotPlanned`."""
        try:
            return self._executables[name]
        except KeyError:
            raise GraphNotPlanned(
                f"no graph {name!r} in this plan; it has {sorted(self._executables)}. "
                f"Add the bucket to the plan and build again."
            ) from None
