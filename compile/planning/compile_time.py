"""Predicted seconds of compiling the graphs of a grid, on two cores, and of their first calls.

    seconds of a graph = once + of_layer * layers + of_byte * cache of a layer on a device

of layers that are unrolled, or those of one turn of a loop; what a decode graph takes once is its
sampling, and the loop over steps. Of the cache, which a decode graph reads, as far as its span
goes, TPU's compiler takes the longer the larger it is. Graphs that give slots take next to nothing
and are left out.

Fitted to Llama 3.1 8B and 70B in `benchmarks/whole_plans.json`: the processor's seconds of a graph,
halved, as two graphs compile at once. Layers with experts in a loop take up to three times as long
there. On the CPU they are the embedded model's, of both phases: what a cold start takes beyond one
from a bundle in `benchmarks/bundle_start.json`, over its graphs of 30 layers (3.4, 3.9 and 4.1 s).

A first call on the CPU takes longer than others by some 0.35 ms for each product, as its library
makes a program of it then: 0.25 to 0.5 s for the embedded model's 30 layers, measured on two cores
of Sapphire Rapids, of which 0.36 s is taken. On other platforms none was measured.
"""

from dataclasses import dataclass

from ..grids.bucket_grid import BucketGrid


@dataclass(frozen=True)
class _Fit:
    """Seconds of one graph of a phase."""

    once: float
    of_layer: float
    of_byte: float = 0.0

    def seconds(self, num_layers: int) -> float:
        return self.once + num_layers * self.of_layer


_PREFILL = {"cpu": _Fit(0, 0.13), "gpu": _Fit(0.5, 0.06), "tpu": _Fit(3, 0.2)}
_DECODE = {"cpu": _Fit(0, 0.13), "gpu": _Fit(2.5, 0.18), "tpu": _Fit(7.5, 0.23, 85e-9)}
_FIRST_CALL_OF_LAYER = {"cpu": 0.012}


def first_call_seconds(hardware: str, num_layers: int) -> float:
    """Seconds that the first call of a graph with so many defined layers takes beyond others."""
    return num_layers * _FIRST_CALL_OF_LAYER.get(hardware, 0.0)


@dataclass(frozen=True)
class GraphSeconds:
    """Seconds that one graph of each phase takes to compile."""

    prefill: float = 0.0
    decode: float = 0.0
    of_entry: float = 0.0
    """More, of decode, for each entry of the cache below its span in all slots."""

    @classmethod
    def predicted(cls, platform: str, num_layers: int, entry_bytes: float) -> "GraphSeconds":
        """Predict for a model whose programs define so many layers: of a loop, those of one turn.

        `entry_bytes` are those of an entry of a slot in one layer, on each device.
        """
        prefill, decode = _PREFILL[platform], _DECODE[platform]
        of_entry = decode.of_byte * entry_bytes
        return cls(prefill.seconds(num_layers), decode.seconds(num_layers), of_entry)

    def of_decode(self, slots: int, span: int) -> float:
        """Seconds that one decode graph takes."""
        return self.decode + slots * span * self.of_entry

    def of(self, grid: BucketGrid) -> float:
        """Seconds that all graphs of a grid take."""
        num_prefill = len(grid.prefill) * len(grid.prefill_kinds)
        decode = sum(self.of_decode(grid.decode_slots, span) for span in grid.graph_spans)
        return num_prefill * self.prefill + decode


NO_TIME = GraphSeconds()
