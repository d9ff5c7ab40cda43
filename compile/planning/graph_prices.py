"""The rule by which a grid leaves graphs out: a graph must save more time than its build takes.

The price of a graph is the time to compile it on a cold start, plus the extra time of its first
call. It saves the extra time that its prompts or steps would take in the next longer graph.
`bucket_search` cuts lengths and spans with this price for each graph. So no graph of the result can
be left out, alone or with others, without losing more than is saved.

It is not known whether a start will be warm, so every start counts as cold. The figures depend on
platform, model and layout, and never on this machine: every process, and every part of a job,
leaves out the same graphs.

Knows nothing of schedules.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ...sharding.call import Call
from ..grids.bucket_grid import BucketGrid
from ..grids.bucket_search import cheapest_cuts
from ..grids.grid_defaults import GridDefaults
from ..grids.prefill_bucket import PrefillBucket
from ..grids.prefill_ladder import cheapest_prefill
from ..hardware.hardware import Hardware
from ..target_names import TargetName
from .compile_time import NO_TIME, GraphSeconds
from .cost import CostModel
from .work import Work

_USUAL_KIND = {"cpu": "cpu", "gpu": "a100", "tpu": "v5e"}


@dataclass(frozen=True)
class GraphPrices:
    """Seconds of calls, of compiles, and of first calls."""

    cost: CostModel
    build: GraphSeconds = NO_TIME

    @classmethod
    def of_target(cls, target: str, work: Work, known: Mapping[str, Hardware]) -> "GraphPrices":
        """The prices on a target from published figures.

        A target without a hardware kind gets the usual kind of its platform. On the CPU, bfloat16
        counts as float32: it is used on processors that multiply it at least as fast.
        """
        named = TargetName.parse(target)
        hardware = known[named.kind or _USUAL_KIND[named.platform]]
        if named.platform == "cpu":
            hardware = hardware.shared_by(named.num_devices)
            rates = dict.fromkeys(hardware.flops, hardware.peak("float32"))
            hardware = replace(hardware, flops=rates)
        build = GraphSeconds.predicted(named.platform, work.num_program_layers, work.entry_bytes)
        return cls(CostModel(work, hardware, torus=named.torus), build)

    def of_prefill_bucket(self, num_kinds: int) -> float:
        """The price of a prefill bucket that has `num_kinds` graphs: plain, scoring, or both."""
        first_call = self.cost.first_call_seconds(Call("prefill", 1, 1, 1))
        return num_kinds * (self.build.prefill + first_call)

    def of_decode_graph(self, slots: int, span: int) -> float:
        """The price of a decode graph."""
        first_call = self.cost.first_call_seconds(Call.of_step(slots, span))
        return self.build.of_decode_graph(slots, span) + first_call

    def cheapest_prefill(
        self,
        num_kinds: int,
        lengths: Sequence[int] | np.ndarray,
        max_length: int,
        defaults: GridDefaults,
    ) -> list[PrefillBucket]:
        """Choose the cheapest buckets for prompts of these lengths.

        `num_kinds` is the number of graphs of each bucket: plain, scoring, or both.
        """
        price = self.of_prefill_bucket(num_kinds)
        return cheapest_prefill(lengths, max_length, defaults, self._seconds, price)

    def without_idle_spans(self, grid: BucketGrid, steps: Mapping[int, float]) -> BucketGrid:
        """The grid without the decode graphs that save too little.

        Args:
          grid: A grid with a graph for every span.
          steps: Number of steps that a schedule runs in each span; spans without steps may be
            missing.
        """
        spans = grid.decode_spans
        if len(spans) < 2:
            return grid
        steps_below = np.cumsum([0.0, *(steps.get(span, 0) for span in spans)])

        def costs(end: int) -> np.ndarray:
            step_seconds = self.cost.seconds(grid.decode_call(spans[end]))
            num_steps = steps_below[end + 1] - steps_below[: end + 1]
            return num_steps * step_seconds + self.of_decode_graph(grid.decode_slots, spans[end])

        graphs = tuple(spans[end] for end in cheapest_cuts(costs, len(spans), len(spans)))
        return with_decode_graphs(grid, graphs)

    def _seconds(self, bucket: PrefillBucket) -> float:
        return self.cost.seconds(bucket.call())


def with_decode_graphs(grid: BucketGrid, graphs: Collection[int]) -> BucketGrid:
    """The grid with a decode graph for each of these spans, and for the last one.

    A cache segment is merged with the next one if no graph, no slot and no chunk's span ends
    between them. The schedule of a job is the same for all decode graphs.
    """
    spans = grid.decode_spans
    if not spans:
        return grid
    graphs = {*graphs, spans[-1]}
    slots = grid.span_slots or (grid.decode_slots,) * len(spans)
    ends = {
        span
        for (span, slots_below), (_, slots_above) in pairwise(zip(spans, slots, strict=True))
        if slots_below > slots_above
    }
    if grid.chunks:
        ends |= {bucket.length for bucket in grid.prefill}
    cuts = [cut for cut in zip(spans, slots, strict=True) if cut[0] in ends | graphs]
    kept_spans = tuple(span for span, _ in cuts)
    has_all = graphs.issuperset(kept_spans)
    return replace(
        grid,
        decode_spans=kept_spans,
        span_slots=grid.span_slots and tuple(count for _, count in cuts),
        decode_graphs=None if has_all else tuple(sorted(graphs)),
    )
