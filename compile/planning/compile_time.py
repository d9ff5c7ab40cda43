"""Predicted seconds of compiling the graphs of a grid, on two cores.

    seconds of a graph = once + of_layer * layers

of layers that are unrolled, or those of one turn of a loop; what a decode graph takes once is its
sampling, and the loop over steps. Graphs that give slots take next to nothing and are left out.

Fitted to Llama 3.1 8B and 70B in `benchmarks/whole_plans.json`: the processor's seconds of a graph,
halved, as two graphs compile at once. Layers with experts in a loop take up to three times as long
there. On the CPU they are the embedded model's, of both phases: what a cold start takes beyond one
from a bundle in `benchmarks/bundle_start.json`, over its graphs of 30 layers (3.4, 3.9 and 4.1 s).
"""

from dataclasses import dataclass

from ..bucket_grid import BucketGrid


@dataclass(frozen=True)
class _Fit:
    """Seconds of one graph of a phase."""

    once: float
    of_layer: float

    def seconds(self, num_layers: int) -> float:
        return self.once + num_layers * self.of_layer


_PREFILL = {"cpu": _Fit(0, 0.13), "gpu": _Fit(0.5, 0.06), "tpu": _Fit(3, 0.2)}
_DECODE = {"cpu": _Fit(0, 0.13), "gpu": _Fit(2.5, 0.18), "tpu": _Fit(15, 0.23)}


@dataclass(frozen=True)
class GraphSeconds:
    """Seconds that one graph of each phase takes to compile."""

    prefill: float = 0.0
    decode: float = 0.0

    @classmethod
    def predicted(cls, platform: str, num_layers: int) -> "GraphSeconds":
        """Of a model with so many layers that a program defines: of a loop, those of one turn."""
        found = (_PREFILL[platform], _DECODE[platform])
        return cls(*(fit.seconds(num_layers) for fit in found))

    def of(self, grid: BucketGrid) -> float:
        """Of all graphs of a grid."""
        num_prefill = len(grid.prefill) * (1 + grid.score)
        return num_prefill * self.prefill + len(grid.decode_spans) * self.decode


NO_TIME = GraphSeconds()
