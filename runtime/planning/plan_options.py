"""The options of a plan that is searched for: the workload, the model's numbers, and the limits."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class PlanOptions:
    """The options of `noria plan`, with its defaults."""

    workload: Path
    target: str
    layout: str | None = None
    """A layout, several, or `all`; None for one device, or for a choice among the named ones."""
    dtype: str = "auto"
    weights: str = "float"
    """The format of weights, and so on for the next three, as in `[numbers]` of a plan."""
    group: int = 0
    cache: str = "float"
    activations: str = "float"
    from_output: Path | None = None
    """The output of a finished job, from which output lengths are learned."""
    expected_output: float = 1.0
    """The expected output as a share of `max_tokens`, where no file has the lengths."""
    max_length: int | None = None
    """The largest length of prompt and output together, for rows without `max_tokens`."""
    calibration: Path | None = None
    hardware: Path | None = None
    """Device tables in addition to the published ones."""
    chunks: Literal["auto", "never", "always"] = "auto"
    page: int | None = None
    """The entries of a page of the cache; None for those that suit the layout."""
    scan_layers: bool = False
    max_padding: float = math.inf
    """The largest ratio of computed to real prompt tokens."""
    max_prefill_graphs: int = 8
    max_compile_minutes: float = math.inf
    compile_layouts: int = 0
    """The number of the best layouts of which the costliest graphs are compiled."""
    max_memory_gb: float | None = None
    """Memory for weights and cache on each device; None for most of the device."""
    tries: int = 24
    """The largest number of grids to simulate for each layout."""
    quiet: bool = False
