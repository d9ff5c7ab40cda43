"""The rule by which a grid leaves graphs out: a graph must save more time than its build takes.

The price of a graph is the time to compile it on a cold start, plus the extra time of its first
call. It saves the extra time that its prompts would take in the next longer graph. `bucket_search`
cuts lengths with this price for each graph. So no graph of the result can be left out, alone or
with others, without losing more than is saved.

It is not known whether a start will be warm, so every start counts as cold. The figures depend on
platform, model and layout, and never on this machine: every process, and every part of a job,
leaves out the same graphs.

Knows nothing of schedules.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...sharding.call import Call
from ..grids.bucket_grid import BucketGrid
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

    def of_decode_graph(self, grid: BucketGrid) -> float:
        """The price of the decode graph of a grid."""
        return self.build.of_decode(grid) + self.cost.first_call_seconds(grid.decode_call())

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

    def _seconds(self, bucket: PrefillBucket) -> float:
        return self.cost.seconds(bucket.call())
