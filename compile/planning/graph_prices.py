"""The rule by which a grid leaves graphs out: each must save what building it takes, and more.

A graph costs the seconds of compiling it on a cold start and those that its first call takes beyond
others. It saves what its prompts or steps would take longer in the next longer graph. Lengths and
spans are cut by `bucket_search`, with that price for each graph, so of the graphs that remain none
can be left out, alone or with others, without losing more than is saved.

Whether a start will be warm is not known when a grid is made, so that every start counts as cold.
The figures are of a platform, a model and a layout, never of this machine: every process, and every
part of a job, leaves out the same graphs.

Knows nothing of schedules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ...sharding.call import Call
from ..grids.bucket_grid import BucketGrid, PrefillBucket
from ..grids.bucket_search import cheapest_cuts
from ..grids.grid_defaults import GridDefaults
from ..grids.prefill_ladder import cheapest_prefill
from ..target_names import TargetName
from .compile_time import NO_TIME, GraphSeconds
from .cost import CostModel
from .hardware import Hardware
from .work import Work

_USUAL_KIND = {"cpu": "cpu", "gpu": "a100", "tpu": "v5e"}


@dataclass(frozen=True)
class GraphPrices:
    """Seconds of calls, of building graphs, and of first calls."""

    cost: CostModel
    build: GraphSeconds = NO_TIME

    @classmethod
    def of_target(cls, target: str, work: Work, known: Mapping[str, Hardware]) -> "GraphPrices":
        """The prices on a target by published figures; a target without a kind has a usual one.

        On the CPU bfloat16 counts as float32: it is for processors that multiply it no slower.
        """
        named = TargetName.parse(target)
        found = known[named.kind or _USUAL_KIND[named.platform]]
        if named.platform == "cpu":
            found = found.shared_by(named.num_devices)
            found = replace(found, flops=dict.fromkeys(found.flops, found.peak("float32")))
        build = GraphSeconds.predicted(named.platform, work.num_defined, work.entry_bytes)
        return cls(CostModel(work, found, torus=named.torus), build)

    def of_prefill(self, num_kinds: int) -> float:
        """The price of a prefill bucket with graphs of so many kinds: plain, scoring, or both."""
        first_call = self.cost.first_call_seconds(Call("prefill", 1, 1, 1))
        return num_kinds * (self.build.prefill + first_call)

    def of_decode(self, slots: int, span: int) -> float:
        """The price of a decode graph."""
        first_call = self.cost.first_call_seconds(Call.of_step(slots, span))
        return self.build.of_decode(slots, span) + first_call

    def prefill(
        self,
        num_kinds: int,
        lengths: Sequence[int] | np.ndarray,
        max_length: int,
        defaults: GridDefaults,
    ) -> list[PrefillBucket]:
        """The buckets of least seconds for prompts of these lengths, with graphs of so many
        kinds."""
        price = self.of_prefill(num_kinds)
        return cheapest_prefill(lengths, max_length, defaults, self._seconds, price)

    def without_idle_spans(self, grid: BucketGrid, steps: Mapping[int, float]) -> BucketGrid:
        """The grid without the decode graphs that save too little.

        A cut of the cache at which no graph, no slot and no span of chunks ends is left out too.

        Args:
            grid: A grid with a graph for every span.
            steps: The steps that a schedule runs in each of them; none of one that is not named.
        """
        spans = grid.decode_spans
        if len(spans) < 2:
            return grid
        steps_below = np.cumsum([0.0, *(steps.get(span, 0) for span in spans)])

        def costs(end: int) -> np.ndarray:
            of_step = self.cost.seconds(grid.decode_call(spans[end]))
            saved_up = steps_below[end + 1] - steps_below[: end + 1]
            return saved_up * of_step + self.of_decode(grid.decode_slots, spans[end])

        graphs = tuple(spans[end] for end in cheapest_cuts(costs, len(spans), len(spans)))
        slots = grid.span_slots or (grid.decode_slots,) * len(spans)
        ends = {
            span
            for (span, here), (_, beyond) in pairwise(zip(spans, slots, strict=True))
            if here > beyond
        }
        if grid.chunks:
            ends |= {bucket.length for bucket in grid.prefill}
        cuts = [cut for cut in zip(spans, slots, strict=True) if cut[0] in ends.union(graphs)]
        kept = tuple(span for span, _ in cuts)
        return replace(
            grid,
            decode_spans=kept,
            span_slots=grid.span_slots and tuple(count for _, count in cuts),
            decode_graphs=None if graphs == kept else graphs,
        )

    def _seconds(self, bucket: PrefillBucket) -> float:
        return self.cost.seconds(bucket.call())
