"""Derives a grid from the lengths of a job, if no plan is given.

The prefill lengths come from `prefill_ladder`. The cache is in pages: as many as the longest rows
fill, one in each slot. Knows nothing of models or devices.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...modelzoo.config_values import check_count
from ...modelzoo.errors import UserError
from .bucket_grid import BucketGrid
from .grid_defaults import GridDefaults, round_up
from .grid_values import check_page_size, chunk_sizes
from .page_count import with_needed_pages
from .prefill_bucket import PrefillBucket
from .prefill_ladder import cheapest_prefill, with_small_calls
from .row_shape import RowShape
from .slot_use import SlotUse

if TYPE_CHECKING:
    from ..planning.graph_prices import GraphPrices


def derive_grid(
    rows: Sequence[RowShape],
    max_position: int,
    defaults: GridDefaults | None = None,
    fits: Callable[[int], bool] | None = None,
    prices: "GraphPrices | None" = None,
    holds: Callable[[int, int], bool] | None = None,
) -> BucketGrid:
    """Derive the default grid of a job: cheapest prefill lengths, and slots and pages for its rows.

    The grid has no slots if all rows are only scored, in whole prompts.

    Args:
      rows: The rows that can run.
      max_position: The model's context.
      defaults: The sizes to aim for.
      fits: Whether there is room for a row of this length. Rows without `max_tokens` may continue
        as far as there is, and at least to their expected length.
      prices: Costs of calls and graphs; without them only padding counts.
      holds: Whether a device holds so many rows of this length. If not, the grid has fewer slots.
        None if the slots of `defaults` are few enough anyway.
    """
    defaults = defaults or GridDefaults()
    # rows that no grid of this model can hold will be refused, so they must not lengthen the grid
    rows = [row for row in rows if row.min_length <= max_position] or [RowShape(1, 1)]
    use = SlotUse.of_rows(rows, has_chunks=bool(defaults.chunks))
    slots = max(1, min(defaults.max_decode_slots, use.num_sequences))
    max_length = _expected_length(rows, max_position, defaults)
    if holds is not None:
        slots = slots_that_fit(holds, slots, max_length, defaults.slot_multiple)
    if defaults.max_length is not None:
        max_length = defaults.max_length
    elif fits is not None and any(row.max_tokens is None for row in rows):
        max_length = max(max_length, _longest_that_fits(fits, max_position, defaults.page))
    lengths = [row.prompt_length for row in rows]
    score = any(row.is_scored for row in rows)
    has_slots = (
        bool(defaults.chunks) or defaults.keeps_slots or not all(row.is_only_scored for row in rows)
    )
    if defaults.chunks:
        prefill = _packed_calls(max_length, max(lengths), min(slots, len(rows)), defaults)
    else:
        cheapest = cheapest_prefill
        if prices is not None:
            cheapest = partial(prices.cheapest_prefill, has_slots + score)
        buckets = cheapest(lengths, max_length, defaults)
        prefill = with_small_calls(buckets, slots, use.num_sequences, defaults)
    grid = grid_of(max_length, prefill, slots if has_slots else 0, score, defaults)
    return with_needed_pages(grid, use) if has_slots else grid


def grid_of(
    max_length: int,
    prefill: Sequence[PrefillBucket],
    slots: int,
    score: bool,
    defaults: GridDefaults,
    chunks_per_decode: int | None = None,
) -> BucketGrid:
    """The grid of these graphs, with pages for rows of `max_length` in all slots, if it has any."""
    groups = defaults.slot_groups
    return BucketGrid(
        max_length=max_length,
        prefill=tuple(prefill),
        decode_slots=round_up(slots, defaults.slot_multiple),
        steps_per_call=defaults.steps_per_call,
        score=score,
        chunks_per_decode=chunks_per_decode,
        slot_groups=groups if slots and groups > 1 else None,
        page=defaults.page if slots else None,
    )


def slots_that_fit(
    holds: Callable[[int, int], bool], slots: int, length: int, multiple: int = 1
) -> int:
    """The largest number of slots, up to `slots` and at least 1, that a device holds.

    Args:
      holds: Whether a device holds a cache with this many slots and positions.
      slots: The wanted number of slots.
      length: Positions of each slot.
      multiple: Numbers of slots are rounded up to a multiple of this.
    """
    counts = range(1, slots + 1)
    fitting = bisect_left(
        counts, True, key=lambda count: not holds(round_up(count, multiple), length)
    )
    return max(1, fitting)


def _expected_length(rows: Sequence[RowShape], max_position: int, defaults: GridDefaults) -> int:
    """Length of the longest row, if rows without `max_tokens` emit the expected output."""
    unlimited = defaults.unspecified_output
    wanted = max(
        row.prompt_length + unlimited if row.max_tokens is None else row.min_length for row in rows
    )
    return min(round_up(wanted, defaults.length_step), max_position)


def _longest_that_fits(fits: Callable[[int], bool], max_position: int, page: int) -> int:
    """The model's context if there is room for it, else the longest row of whole pages."""
    if fits(max_position):
        return max_position
    pages = range(1, max_position // page + 1)
    return page * bisect_left(pages, True, key=lambda count: not fits(count * page))


def with_overrides(defaults: GridDefaults, asked: Any) -> GridDefaults:
    """The defaults, changed by a user's values of `chunk`, `max_length`, `page` and slots.

    Raises:
      ValueError: `asked` is not a table, or the value of one of these keys is invalid.
    """
    if not isinstance(asked, Mapping):
        raise UserError(
            f"buckets: expected a table, got {asked!r}. Set one key, as in buckets.max_length=1024."
        )
    if "chunk" in asked:
        defaults = replace(defaults, chunks=chunk_sizes(asked["chunk"]))
    if "page" in asked:
        check_page_size(1, asked["page"])
        defaults = replace(defaults, page=asked["page"])
    if {"decode_slots", "pages", "page"} & set(asked) and asked.get("decode_slots") != 0:
        defaults = replace(defaults, keeps_slots=True)
    if "max_length" in asked:
        check_count("buckets.max_length", asked["max_length"])
        defaults = replace(defaults, max_length=asked["max_length"])
    return defaults


def _packed_calls(
    max_length: int, longest_prompt: int, most_rows: int, defaults: GridDefaults
) -> Sequence[PrefillBucket]:
    """The calls of chunks, which pieces of prompts share."""
    if (longest := defaults.chunks[-1]) > max_length:
        raise UserError(
            f"buckets.chunk: expected at most {max_length}, the longest row of this job or model, "
            f"got {longest}. Plan a smaller chunk."
        )
    prompt = min(longest_prompt, max_length)
    return [
        # a call may have all pieces of a prompt
        PrefillBucket(
            max_length, defaults.chunk_batch(chunk, most_rows * -(-prompt // chunk)), chunk
        )
        for chunk in defaults.chunks
    ]


def ladder_grid(
    max_length: int, slots: int, *, score: bool, defaults: GridDefaults | None = None
) -> BucketGrid:
    """A grid for unknown requests: prefill lengths that double up to `max_length`, or chunks."""
    defaults = defaults or GridDefaults()
    if defaults.chunks:
        prefill = _packed_calls(max_length, max_length, slots, defaults)
        return grid_of(max_length, prefill, slots, score, defaults)
    length = defaults.longest_prefill(max_length)
    lengths = [length]
    while length > 2 * defaults.length_step and len(lengths) < defaults.max_prefill_graphs:
        length = round_up(length // 2, defaults.length_step)
        lengths.append(length)
    prefill = []
    for length in sorted(set(lengths)):
        batch = max(1, min(defaults.tokens_per_prefill // length, slots))
        prefill.append(PrefillBucket(length, round_up(batch, defaults.batch_multiple)))
    return grid_of(max_length, prefill, slots, score, defaults)
