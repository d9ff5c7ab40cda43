"""The executables of a grid, called by name of their bucket; a shape outside the grid is refused.

Knows nothing of requests, text or clocks. There is no fallback: nothing here can compile.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from ..modelzoo.chunk_cache import ChunkRows
from ..modelzoo.moe.use import ExpertReport
from ..modelzoo.sampling import SamplingState, TokenScores
from .bucket_grid import BucketGrid, PrefillBucket
from .steps import DecodeOutput, DecodeState, Prompts

Parameters = Mapping[str, jax.Array]


def graph_names(grid: BucketGrid) -> set[str]:
    """Of every graph of a grid."""
    names = {CompiledGraphs.decode_name(span) for span in grid.decode_spans}
    names.add(CompiledGraphs.EMPTY_STATE)
    kinds = (False, True) if grid.score else (False,)
    if grid.chunks:
        names |= {CompiledGraphs.OPEN, CompiledGraphs.FORK}
        return names | {CompiledGraphs.chunk_name(b, kind) for b in grid.prefill for kind in kinds}
    for bucket in grid.prefill:
        names |= {CompiledGraphs.prefill_name(bucket), CompiledGraphs.insert_name(bucket)}
        if grid.score:
            names.add(CompiledGraphs.score_name(bucket))
    return names


class GraphNotPlanned(ValueError):
    """A call for a graph that the plan does not have."""


class CompiledGraphs:
    """The executables of one grid: of prefill, whole or in chunks, of slots, and of decode."""

    OPEN = "open"
    FORK = "fork"
    EMPTY_STATE = "empty state"

    def __init__(self, grid: BucketGrid, executables: Mapping[str, jax.stages.Compiled]):
        self.grid = grid
        self.executables = executables
        """By name; those of a bundle may still be loading, and are waited for."""

    @staticmethod
    def prefill_name(bucket: PrefillBucket) -> str:
        return f"prefill {bucket}"

    @staticmethod
    def score_name(bucket: PrefillBucket) -> str:
        return f"score {bucket}"

    @staticmethod
    def insert_name(bucket: PrefillBucket) -> str:
        return f"insert {bucket}"

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

    @staticmethod
    def chunk_name(bucket: PrefillBucket, is_scored: bool) -> str:
        return f"chunk{' score' * is_scored} {bucket}"

    def empty_state(self) -> DecodeState:
        """A decode state without rows, in place."""
        return self.executable(self.EMPTY_STATE)()

    def open(
        self,
        state: DecodeState,
        slot: jax.Array,
        prompt_length_1: jax.Array,
        limit_1: jax.Array,
        sampling: SamplingState,
    ) -> DecodeState:
        """Give a slot to a prompt. `state` is donated."""
        return self.executable(self.OPEN)(state, slot, prompt_length_1, limit_1, sampling)

    def fork(
        self, state: DecodeState, source: jax.Array, slot: jax.Array, sampling: SamplingState
    ) -> DecodeState:
        """Copy a slot to another. `state` is donated."""
        return self.executable(self.FORK)(state, source, slot, sampling)

    def chunk(
        self,
        parameters: Parameters,
        state: DecodeState,
        bucket: PrefillBucket,
        rows: ChunkRows,
        tokens_BT: jax.Array,
    ) -> tuple[DecodeState, ExpertReport | None]:
        """Pour a chunk each into some slots. `state` is donated."""
        graph = self.executable(self.chunk_name(bucket, False))
        return self._over_span(state, bucket.length, partial(graph, parameters), rows, tokens_BT)

    def chunk_score(
        self,
        parameters: Parameters,
        state: DecodeState,
        bucket: PrefillBucket,
        rows: ChunkRows,
        tokens_BT: jax.Array,
        next_BT: jax.Array,
        num_logprobs_B: jax.Array,
    ) -> tuple[DecodeState, tuple[ExpertReport | None, TokenScores]]:
        """Pour a chunk each into some slots, and score it. `state` is donated."""
        graph = partial(self.executable(self.chunk_name(bucket, True)), parameters)
        arguments = (rows, tokens_BT, next_BT, num_logprobs_B)
        return self._over_span(state, bucket.length, graph, *arguments)

    def decode(
        self, parameters: Parameters, state: DecodeState, is_live_B: jax.Array, span: int
    ) -> tuple[DecodeState, DecodeOutput]:
        """Several steps for the live rows over `span` cache positions. `state` is donated."""
        graph = partial(self.executable(self.decode_name(span)), parameters)
        return self._over_span(state, span, graph, is_live_B)

    def _over_span(
        self, state: DecodeState, span: int, graph: Callable[..., Any], *arguments: Any
    ) -> tuple[DecodeState, Any]:
        """Call a graph that takes what the cache has below a span and gives it back."""
        num_segments = self.grid.decode_spans.index(span) + 1
        head = state._replace(cache=state.cache.head(num_segments))
        new, output = graph(head, *arguments)
        return new._replace(cache=state.cache.with_head(new.cache)), output

    def executable(self, name: str) -> Any:
        """The executable of that name, or `GraphNotPlanned`."""
        try:
            return self.executables[name]
        except KeyError:
            raise GraphNotPlanned(
                f"no graph {name!r} in this plan; it has {sorted(self.executables)}. "
                f"Add the bucket to the plan and build again."
            ) from None
