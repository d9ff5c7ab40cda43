"""Groups of layers that run as one scan, and the names of their stacked parameters.

Layers repeat a pattern of kinds: layers `first`, `first + period`, ... differ only in their
weights, so one block can run all of them. A *group* is one repeated pattern: a tuple with the
layers of each block of the pattern. Iteration i of the scan over a group runs layer i of each block
in turn. Ten layers of the kinds `d w w g w w g w w g` give these groups:

    unrolled     [0] [1] [2] [3] [4] [5] [6] [7] [8] [9]       ten groups of one repeat
    scanned      [0] [1:10:3  2:10:3  3:10:3]                  one repeat, and three

The parameters of a block with several layers are stacked along a first axis: `layers.1:10:3.norm`
holds the norms of layers 1, 4 and 7. Knows nothing of weights or scans.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from .config import Arrangement, DecoderConfig

Group = tuple[range, ...]
"""The layers of each block of a repeated pattern."""

_STACKED_PARAMETER = re.compile(r"layers\.(\d+):(\d+)(?::(\d+))?\.")


@cache
def layer_groups(config: DecoderConfig, arrangement: Arrangement) -> tuple[Group, ...]:
    """The groups of a decoder, in the order in which they run."""
    num_layers = config.num_layers
    first, period, repeats = 0, 1, 1
    if arrangement.scan_layers:
        first, period, repeats = longest_repeat(config.layers)
    end = first + period * repeats
    single = [(range(i, i + 1),) for i in range(num_layers) if not first <= i < end]
    repeated = tuple(range(first + offset, end, period) for offset in range(period))
    return (*single[:first], repeated, *single[first:])


def block_layers(config: DecoderConfig, arrangement: Arrangement) -> list[range]:
    """The layers of each block of a decoder, in the order in which blocks run."""
    return [layers for group in layer_groups(config, arrangement) for layers in group]


def longest_repeat(kinds: Sequence[Any]) -> tuple[int, int, int]:
    """Find the repeated pattern that leaves the smallest number of blocks to define.

    Returns:
      The first layer, the period and the number of repeats. Ties go to the shortest period, then to
      the first layer.
    """
    count = len(kinds)

    def count_repeats(first: int, period: int) -> int:
        pattern, end = kinds[first : first + period], first + period
        while kinds[end : end + period] == pattern:
            end += period
        return (end - first) // period

    patterns = ((first, period) for period in range(1, count + 1) for first in range(count))
    repeats = [(*pattern, count_repeats(*pattern)) for pattern in patterns if sum(pattern) <= count]
    return min(repeats, key=lambda repeat: count - repeat[1] * (repeat[2] - 1))


def layers_name(layers: range) -> str:
    """The name of layers in parameters: `3`, or for several layers a slice, `3:61` or `0:26:2`."""
    if len(layers) == 1:
        return str(layers.start)
    step = "" if layers.step == 1 else f":{layers.step}"
    return f"{layers.start}:{layers.stop}{step}"


def single_layer_names(parameter: str) -> list[str]:
    """The names of the single-layer parameters in a stacked one; any other name by itself."""
    match = _STACKED_PARAMETER.match(parameter)
    if match is None:
        return [parameter]
    start, stop, step = (int(number or 1) for number in match.groups())
    rest = parameter[match.end() :]
    return [f"layers.{layer}.{rest}" for layer in range(start, stop, step)]
