"""Which layers are one definition that runs in turns, and what their parameters are called.

Layers repeat a pattern of kinds: layers `first`, `first + period`, ... are alike but for weights. A
*group* is the places of such a pattern, each the layers that stand at it; turn t of a group runs
layer t of every place. Ten layers of kinds `d w w g w w g w w g`, d dense and g without window, are

    unrolled     [0] [1] [2] [3] [4] [5] [6] [7] [8] [9]       ten groups of one turn
    scanned      [0] [1:10:3  2:10:3  3:10:3]                  one turn, and three

The parameters of a place of several turns are one array with the layers first: `layers.1:10:3.norm`
has those of layers 1, 4 and 7. Knows nothing of weights or scans.
"""

import re
from collections.abc import Sequence
from functools import cache
from typing import Any

from .config import Arrangement, DecoderConfig

Group = tuple[range, ...]

_OF_SEVERAL = re.compile(r"layers\.(\d+):(\d+)(?::(\d+))?\.")


@cache
def layer_groups(config: DecoderConfig, arrangement: Arrangement) -> tuple[Group, ...]:
    """The groups of a decoder, in the order in which they run."""
    num_layers = config.num_layers
    first, period, turns = 0, 1, 1
    if arrangement.scan_layers:
        first, period, turns = longest_repeat(config.layer_kinds)
    end = first + period * turns
    alone = [(range(i, i + 1),) for i in range(num_layers) if not first <= i < end]
    repeated = tuple(range(first + place, end, period) for place in range(period))
    return (*alone[:first], repeated, *alone[first:])


def block_layers(config: DecoderConfig, arrangement: Arrangement) -> list[range]:
    """The layers of every place of all groups: a decoder has one block for each."""
    return [layers for group in layer_groups(config, arrangement) for layers in group]


def longest_repeat(kinds: Sequence[Any]) -> tuple[int, int, int]:
    """First layer, period and turns of the repeat that leaves fewest layers to define.

    Of several the one of the shortest period, and of those the first.
    """
    count = len(kinds)

    def turns(first: int, period: int) -> int:
        pattern, end = kinds[first : first + period], first + period
        while kinds[end : end + period] == pattern:
            end += period
        return (end - first) // period

    places = ((first, period) for period in range(1, count + 1) for first in range(count))
    repeats = [(*at, turns(*at)) for at in places if sum(at) <= count]
    return min(repeats, key=lambda repeat: count - repeat[1] * (repeat[2] - 1))


def layers_name(layers: range) -> str:
    """`3` of one layer, `3:61` or `0:26:2` of several, as Python's slices count."""
    if len(layers) == 1:
        return str(layers.start)
    step = "" if layers.step == 1 else f":{layers.step}"
    return f"{layers.start}:{layers.stop}{step}"


def single_layer_names(parameter: str) -> list[str]:
    """The names of what a parameter holds, layer by layer; itself if it is not of several."""
    found = _OF_SEVERAL.match(parameter)
    if found is None:
        return [parameter]
    start, stop, step = (int(number or 1) for number in found.groups())
    rest = parameter[found.end() :]
    return [f"layers.{layer}.{rest}" for layer in range(start, stop, step)]
