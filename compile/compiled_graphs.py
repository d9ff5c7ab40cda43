"""The executables of a grid, called by bucket or span; a shape outside the grid is refused.

Knows nothing of requests, text or clocks. There is no fallback: nothing here compiles.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax

from ..modelzoo.attention.prompt_pieces import PromptPieces
from ..modelzoo.sampling import SamplingState
from ..modelzoo.structure import StructureTables
from .graphs.embed_step import EmbedOutput
from .graphs.prefill_steps import PrefillOutput, SlotRequests
from .graphs.steps import DecodeOutput, DecodeState
from .grids.bucket_grid import BucketGrid
from .grids.prefill_bucket import PrefillBucket

Parameters = Mapping[str, jax.Array]


def graph_names(grid: BucketGrid) -> set[str]:
    """Names of all graphs of a grid."""
    if grid.embed:
        return set(map(CompiledGraphs.embed_name, grid.prefill))
    names = {CompiledGraphs.decode_name(span) for span in grid.graph_spans}
    names |= {CompiledGraphs.EMPTY_STATE} | ({CompiledGraphs.FORK} if grid.decode_slots else set())
    if grid.prefixes is not None:
        names |= {CompiledGraphs.PREFIX, CompiledGraphs.CLEAR_PREFIX}
    kinds = grid.prefill_kinds
    return names | {CompiledGraphs.prefill_name(b, kind) for b in grid.prefill for kind in kinds}


class GraphNotPlanned(ValueError):
    """A call for a graph that the plan does not have."""


class CompiledGraphs:
    """The executables of one grid: prefill, decode, fork, prefixes and the empty state."""

    FORK = "fork"
    PREFIX = "prefill prefix"
    CLEAR_PREFIX = "clear prefix"
    EMPTY_STATE = "empty state"

    def __init__(self, grid: BucketGrid, executables: Mapping[str, jax.stages.Compiled]):
        self.grid = grid
        self.executables = executables
        """The executables, by name."""

    @staticmethod
    def prefill_name(bucket: PrefillBucket, is_scored: bool = False) -> str:
        return f"{'score' if is_scored else 'prefill'} {bucket}"

    @staticmethod
    def embed_name(bucket: PrefillBucket) -> str:
        return f"embed {bucket}"

    @staticmethod
    def decode_name(span: int) -> str:
        return f"decode span {span}"

    def empty_state(self) -> DecodeState:
        """A new decode state without rows, on the devices."""
        return self.executable(self.EMPTY_STATE)()

    def prefill(
        self,
        parameters: Parameters,
        state: DecodeState,
        bucket: PrefillBucket,
        rows: PromptPieces,
        requests: SlotRequests,
        tokens_BT: jax.Array,
    ) -> tuple[DecodeState, PrefillOutput]:
        """Write the next piece of each prompt into its slot. `state` is donated."""
        graph = partial(self.executable(self.prefill_name(bucket)), parameters)
        return self._over_span(state, bucket.length, graph, rows, requests, tokens_BT)

    def score(
        self,
        parameters: Parameters,
        state: DecodeState,
        bucket: PrefillBucket,
        rows: PromptPieces,
        requests: SlotRequests,
        tokens_BT: jax.Array,
        next_BT: jax.Array,
        num_logprobs_B: jax.Array,
    ) -> tuple[DecodeState, PrefillOutput]:
        """Write the next piece of each prompt into its slot, and score it. `state` is donated."""
        graph = partial(self.executable(self.prefill_name(bucket, is_scored=True)), parameters)
        arguments = (rows, requests, tokens_BT, next_BT, num_logprobs_B)
        return self._over_span(state, bucket.length, graph, *arguments)

    def embed(
        self,
        parameters: Parameters,
        bucket: PrefillBucket,
        tokens_BT: jax.Array,
        count_B: jax.Array,
        first_B: jax.Array,
    ) -> EmbedOutput:
        """The vectors of texts; the arguments are those of `embed_step`."""
        graph = self.executable(self.embed_name(bucket))
        return graph(parameters, tokens_BT, count_B, first_B)

    def fork(
        self, state: DecodeState, source: jax.Array, slot: jax.Array, sampling: SamplingState
    ) -> DecodeState:
        """Copy `source` to `slot`; a source past all slots clears `slot`. `state` is donated."""
        return self.executable(self.FORK)(state, source, slot, sampling)

    def prefix(
        self,
        parameters: Parameters,
        state: DecodeState,
        rows: PromptPieces,
        tokens_BT: jax.Array,
        *adapter_B: jax.Array,
    ) -> tuple[DecodeState, PrefillOutput]:
        """Write the next piece of a prefix to its row. `state` is donated.

        A plan with adapters needs the number of each row's adapter, `adapter_B`.
        """
        graph = partial(self.executable(self.PREFIX), parameters)
        return self._with_segments(state, 0, graph, rows, tokens_BT, *adapter_B)

    def clear_prefix(self, state: DecodeState, row: jax.Array) -> DecodeState:
        """Make a prefix empty. `state` is donated."""
        graph = self.executable(self.CLEAR_PREFIX)
        return self._with_segments(state, 0, lambda *x: (graph(*x), None), row)[0]

    def decode(
        self,
        parameters: Parameters,
        state: DecodeState,
        is_live_B: jax.Array,
        span: int,
        structures: StructureTables | None = None,
    ) -> tuple[DecodeState, DecodeOutput]:
        """Decode several steps of the live rows over `span` cache positions. `state` is donated.

        A plan with structured output needs the tables of its automata, `structures`.
        """
        graph = partial(self.executable(self.decode_name(span)), parameters)
        tables = () if structures is None else (structures,)
        return self._over_span(state, span, graph, is_live_B, *tables)

    def _over_span(
        self, state: DecodeState, span: int, graph: Callable[..., Any], *arguments: Any
    ) -> tuple[DecodeState, Any]:
        """Call a graph that takes and returns the cache segments below a span."""
        return self._with_segments(state, self.grid.num_segments(span), graph, *arguments)

    @staticmethod
    def _with_segments(
        state: DecodeState, num_segments: int, graph: Callable[..., Any], *arguments: Any
    ) -> tuple[DecodeState, Any]:
        """Call a graph that takes and returns the first segments of the cache."""
        head = state._replace(cache=state.cache.head(num_segments))
        new, output = graph(head, *arguments)
        return new._replace(cache=state.cache.with_head(new.cache)), output

    def executable(self, name: str) -> Any:
        """The executable with a name; raises `GraphNotPlanned` if there is none."""
        try:
            return self.executables[name]
        except KeyError:
            raise GraphNotPlanned(
                f"no graph {name!r} in this plan; it has {sorted(self.executables)}. "
                f"Add the bucket to the plan and build again."
            ) from None
