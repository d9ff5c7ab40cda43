"""Predicted seconds to compile the graphs of a grid on two cores, and of their first calls.

    seconds of a graph = once + per_layer * layers + per_byte * cache of a layer on a device

The layers are all unrolled layers, or the layers in one iteration of a loop over layers. The
constant of a decode graph is for sampling and the loop over steps. TPU's compiler takes longer for
a larger cache.

Fitted to Llama 3.1 8B and 70B in `benchmarks/whole_plans.json`: processor seconds of a graph,
halved because two graphs compile at once. Expert layers in a loop take up to three times as long
there. The figures of the CPU are from the embedded model, for both phases: the extra time of a cold
start over a start from a bundle in `benchmarks/bundle_start.json`, divided by the number of graphs.
It is 3.4, 3.9 and 4.1 s for a graph of 30 layers. These graphs are those that run the model, so
their seconds include those of the two small graphs: the copy of a slot, and the empty state.

On TPU, the copy of a slot took 2.8 s of one processor for the 32 layers of Llama 3.1 8B, 6.6 s for
the 80 layers of 70B, and 1.0 s for a loop over layers. On GPUs it was not compiled; its figures are
those of the recorded graphs that wrote a prompt into its slot (`insert`).

A first call on the CPU takes about 0.35 ms longer for each product than other calls, because its
library then generates code for the product. For the 30 layers of the embedded model this is 0.25 to
0.5 s, measured on two cores of Sapphire Rapids; 0.36 s is used here. It was not measured on other
platforms.
"""

from dataclasses import dataclass, replace

from ..graphs.graph_kinds import DECODE, EMPTY_STATE, FORK, graph_keys
from ..grids.bucket_grid import BucketGrid


@dataclass(frozen=True)
class _Fit:
    """Coefficients of the compile time of one graph of a phase."""

    once: float
    per_layer: float
    per_byte: float = 0.0

    def seconds(self, num_layers: int) -> float:
        return self.once + num_layers * self.per_layer


_PREFILL = {"cpu": _Fit(0, 0.13), "gpu": _Fit(0.5, 0.06), "tpu": _Fit(3, 0.2)}
_DECODE = {"cpu": _Fit(0, 0.13), "gpu": _Fit(2.5, 0.18), "tpu": _Fit(7.5, 0.23, 85e-9)}
_FORK = {"cpu": _Fit(0, 0), "gpu": _Fit(0.2, 0.02), "tpu": _Fit(0.5, 0.035)}
_EMPTY_STATE = {"cpu": 0.0, "gpu": 0.15, "tpu": 0.15}
_FIRST_CALL_PER_LAYER = {"cpu": 0.012}


def first_call_seconds(hardware: str, num_layers: int) -> float:
    """Extra seconds of the first call of a graph whose program defines `num_layers` layers."""
    return num_layers * _FIRST_CALL_PER_LAYER.get(hardware, 0.0)


@dataclass(frozen=True)
class GraphSeconds:
    """Seconds to compile one graph of each kind."""

    prefill: float = 0.0
    """A graph that reads prompts, whatever it returns."""
    decode: float = 0.0
    per_entry: float = 0.0
    """Extra seconds of the decode graph for each entry of the pages."""
    fork: float = 0.0
    empty_state: float = 0.0

    @classmethod
    def predicted(cls, platform: str, num_layers: int, entry_bytes: float = 0.0) -> "GraphSeconds":
        """Predict the seconds for a model.

        Args:
          platform: `cpu`, `gpu` or `tpu`.
          num_layers: Layers that a program defines; for a loop, the layers of one iteration.
          entry_bytes: Average bytes of a cache entry in one layer, on each device.
        """
        build = cls(
            _PREFILL[platform].seconds(num_layers),
            _DECODE[platform].seconds(num_layers),
            fork=_FORK[platform].seconds(num_layers),
            empty_state=_EMPTY_STATE[platform],
        )
        return build.with_entries(platform, entry_bytes)

    @property
    def beside_prefill(self) -> float:
        """Seconds to compile the graphs that do not read prompts, in a grid with few pages."""
        return self.decode + self.fork + self.empty_state

    def with_entries(self, platform: str, entry_bytes: float) -> "GraphSeconds":
        """The same seconds under a layout with so many bytes of an entry on each device."""
        return replace(self, per_entry=_DECODE[platform].per_byte * entry_bytes)

    def of_decode(self, grid: BucketGrid) -> float:
        """Seconds to compile the decode graph of a grid with slots."""
        assert grid.pages is not None and grid.page is not None
        return self.decode + grid.pages * grid.page * self.per_entry

    def of_grid(self, grid: BucketGrid) -> float:
        """Seconds to compile all graphs of a grid."""
        others = {FORK: self.fork, EMPTY_STATE: self.empty_state}
        return sum(
            self.of_decode(grid) if key == DECODE else others.get(key, self.prefill)
            for key in graph_keys(grid)
        )


NO_TIME = GraphSeconds()
