"""Derives the grid of a job that embeds texts: buckets cut exactly at the lengths of its texts.

Padding is all that such a job can waste, and all lengths are known, so the search of
`bucket_search` finds the best cuts. It counts the computed tokens, and a price for each graph.
Knows nothing of models or devices.
"""

from collections.abc import Sequence
from dataclasses import replace

from .bucket_grid import BucketGrid
from .grid_defaults import GridDefaults, round_up
from .prefill_bucket import PrefillBucket
from .prefill_ladder import cheapest_prefill

MAX_GRAPHS = 32
LADDER_GRAPHS = 6
"""The number of graphs for texts of unknown lengths."""
PADDING_PER_GRAPH = 1 / 1000
"""The share of a job's tokens that one more graph must save.

It must also save half of a call's tokens, so that short jobs have few graphs.
"""


def embed_defaults(
    defaults: GridDefaults, *, length_step: int, tokens_per_call: int
) -> GridDefaults:
    """The aims of an embedding grid, from those of a layout.

    Args:
      defaults: Aims for shapes that a layout can split evenly.
      length_step: Lengths are multiples of this number.
      tokens_per_call: Tokens of one call on each piece into which the layout splits rows. Texts
        need no slots, so calls may be larger than those of prefill.
    """
    replicas = defaults.tokens_per_prefill // GridDefaults.tokens_per_prefill
    return replace(
        defaults,
        tokens_per_prefill=tokens_per_call * replicas,
        max_prefill_graphs=MAX_GRAPHS,
        whole_lengths=length_step,
    )


def embed_grid(lengths: Sequence[int], max_position: int, defaults: GridDefaults) -> BucketGrid:
    """The grid of least cost for texts of these lengths: computed tokens, and a price per graph.

    Args:
      lengths: The number of tokens of each text.
      max_position: The model's context; longer texts are left out, as they will be refused.
      defaults: The aims, as `embed_defaults` returns them.
    """
    fitting = [length for length in lengths if length <= max_position] or [1]
    limit = max_position if defaults.max_length is None else defaults.max_length
    # the longest bucket is a multiple of the step, unless the model has fewer positions
    longest = min(-(-max(fitting) // defaults.length_step) * defaults.length_step, limit)
    total = sum(fitting)
    price_of_graph = max(defaults.tokens_per_prefill / 2, PADDING_PER_GRAPH * total)
    buckets = cheapest_prefill(fitting, longest, defaults, price_of_graph=price_of_graph)
    return BucketGrid(
        max_length=max(longest, buckets[-1].length),
        prefill=tuple(buckets),
        decode_slots=0,
        steps_per_call=defaults.steps_per_call,
        embed=True,
    )


def embed_ladder(max_length: int, defaults: GridDefaults) -> BucketGrid:
    """A grid for unknown texts: lengths that double up to `max_length`."""
    lengths = [longest := defaults.longest_prefill(max_length)]
    shortest = max(2 * GridDefaults.whole_lengths, defaults.length_step)
    while lengths[0] > shortest and len(lengths) < LADDER_GRAPHS:
        lengths.insert(0, round_up(lengths[0] // 2, defaults.length_step))
    buckets = (
        PrefillBucket(length, round_up(max(1, tokens // length), defaults.batch_multiple))
        for tokens in [defaults.tokens_per_prefill]
        for length in lengths
    )
    return BucketGrid(longest, tuple(buckets), 0, defaults.steps_per_call, embed=True)
