"""Derives a grid from the lengths of a job, if no plan is given.

The prefill lengths come from `prefill_ladder`. Knows nothing of models or devices.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from ...modelzoo.config_values import check_count
from .bucket_grid import BucketGrid
from .grid_defaults import GridDefaults, round_up
from .grid_values import check_page_size, chunk_sizes
from .prefill_bucket import PrefillBucket
from .prefill_ladder import cheapest_prefill, with_small_calls
from .row_shape import RowShape
from .span_slots import NO_LIMIT, SlotUse

if TYPE_CHECKING:
    from ..planning.graph_prices import GraphPrices

SPAN_STEP = 64


def derive_grid(
    rows: Sequence[RowShape],
    max_position: int,
    defaults: GridDefaults | None = None,
    fits: Callable[[int, int], bool] | None = None,
    prices: "GraphPrices | None" = None,
    holds: Callable[[int, int], bool] | None = None,
) -> BucketGrid:
    """Derive the default grid of a job: cheapest prefill lengths, and slots and spans for its rows.

    Every span has a graph; a schedule decides later which graphs are left out. The grid has no
    slots if all rows are only scored, in whole prompts.

    Args:
      rows: The rows that can run.
      max_position: The model's context.
      defaults: The sizes to aim for.
      fits: Whether a cache with this many slots and positions fits. Rows without `max_tokens` may
        continue as far as it fits, and at least to their expected length.
      prices: Costs of calls and graphs; without them only padding counts.
      holds: Whether a device holds a cache with this many slots and positions. If not, the grid has
        fewer slots. None if the slots of `defaults` are few enough anyway.
    """
    defaults = defaults or GridDefaults()
    # rows that no grid of this model can hold will be refused, so they must not lengthen the grid
    rows = [row for row in rows if row.min_length <= max_position] or [RowShape(1, 1)]
    num_slots = sum(row.num_slots(has_chunks=bool(defaults.chunks)) for row in rows)
    slots = max(1, min(defaults.max_decode_slots, num_slots))
    expected = _expected_length(rows, max_position, defaults)
    if holds is not None:
        slots = slots_that_fit(holds, slots, expected, defaults.slot_multiple)
    max_length = expected
    if defaults.max_length is not None:
        max_length = defaults.longest_span(defaults.max_length)
    elif fits is not None and any(row.max_tokens is None for row in rows):
        # rows share pages, so there must be room for one of the longest rows
        at_once = round_up(slots, defaults.slot_multiple) if defaults.page is None else 1
        room = partial(fits, at_once)
        max_length = max(expected, _longest_that_fits(room, max_position, defaults))
    expected = min(expected, max_length)
    lengths = [row.prompt_length for row in rows]
    score = any(row.is_scored for row in rows)
    if defaults.chunks:
        most_rows = min(slots, len(rows))
        return _chunk_grid(expected, max_length, max(lengths), slots, most_rows, score, defaults)
    has_slots = defaults.keeps_slots or not all(row.is_only_scored for row in rows)
    cheapest = (
        cheapest_prefill if prices is None else partial(prices.cheapest_prefill, has_slots + score)
    )
    return BucketGrid(
        max_length=max_length,
        prefill=with_small_calls(
            cheapest(lengths, max_length, defaults), slots, num_slots, defaults
        ),
        decode_slots=round_up(slots, defaults.slot_multiple) if has_slots else 0,
        decode_spans=_spans(expected, max_length, defaults) if has_slots else (),
        steps_per_call=defaults.steps_per_call,
        score=score,
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
    return defaults.longest_span(min(round_up(wanted, defaults.row_step), max_position))


def _longest_that_fits(
    room: Callable[[int], bool], max_position: int, defaults: GridDefaults
) -> int:
    """The model's context if its cache fits, else the largest multiple of the step that fits."""
    if room(longest := defaults.longest_span(max_position)):
        return longest
    step = math.lcm(SPAN_STEP, defaults.span_multiple)
    return step * bisect_left(range(1, longest // step + 1), True, key=lambda n: not room(n * step))


def slot_use(rows: Sequence[RowShape], *, has_chunks: bool) -> SlotUse:
    """Slots that the rows need, if each row emits its maximum output."""
    counts = [row.num_slots(has_chunks=has_chunks) for row in rows]
    return SlotUse(
        np.array([row.prompt_length for row in rows], int),
        np.array([NO_LIMIT if row.max_tokens is None else row.max_tokens for row in rows], int),
        np.array(counts, int),
    )


def with_chunks(defaults: GridDefaults, chunk: Any) -> GridDefaults:
    """Defaults for prompts in chunks; `chunk` is a user's value: one number or several."""
    return replace(defaults, chunks=chunk_sizes(chunk))


def with_overrides(defaults: GridDefaults, asked: Any) -> GridDefaults:
    """The defaults, changed by a user's values of `chunk`, `max_length`, `page` and slots.

    A `page` of 0 asks for no pages.

    Raises:
      ValueError: `asked` is not a table, or the value of one of these keys is invalid.
    """
    if not isinstance(asked, Mapping):
        raise ValueError(
            f"buckets: expected a table, got {asked!r}. Set one key, as in buckets.max_length=1024."
        )
    if "chunk" in asked:
        defaults = with_chunks(defaults, asked["chunk"])
    keys_of_slots = {"decode_slots", "decode_spans", "span_slots"}
    if asks_for_no_pages(asked):
        defaults = replace(defaults, page=None)
    elif "page" in asked:
        check_page_size(1, asked["page"])
        defaults = replace(defaults, page=asked["page"])
        keys_of_slots.add("page")
    if keys_of_slots & set(asked) and asked.get("decode_slots") != 0:
        defaults = replace(defaults, keeps_slots=True)
    if "max_length" in asked:
        check_count("buckets.max_length", asked["max_length"])
        defaults = replace(defaults, max_length=asked["max_length"])
    return defaults


def asks_for_no_pages(asked: Mapping[str, Any]) -> bool:
    """Whether a user's values ask for a cache without pages, by a `page` of 0."""
    page = asked.get("page")
    return page == 0 and not isinstance(page, bool)


def _chunk_grid(
    expected: int,
    max_length: int,
    longest_prompt: int,
    slots: int,
    most_rows: int,
    score: bool,
    defaults: GridDefaults,
) -> BucketGrid:
    """A grid with spans of whole chunks up to the expected length; the last covers the rest.

    It has no pages yet. `page_count.with_pages` gives it one span.
    """
    longest = defaults.chunks[-1]
    whole = min(round_up(expected, longest), max_length // longest * longest)
    if not whole:
        raise ValueError(
            f"buckets.chunk: expected at most {max_length}, the longest row of this job or model, "
            f"got {longest}. Plan a smaller chunk."
        )
    count, step = defaults.max_decode_graphs, math.lcm(SPAN_STEP, longest)
    count = max(1, count - (max_length > expected))
    steps = {min(round_up(whole * i // count, step), whole) for i in range(1, count)}
    cuts = sorted(steps | {whole})
    needed = min(longest_prompt, whole)
    last = next(i for i, span in enumerate(cuts) if needed <= span)

    def most_pieces(chunk: int) -> int:
        # with pages, a call may have all pieces of a prompt
        return most_rows if defaults.page is None else most_rows * -(-needed // chunk)

    prefill = (
        PrefillBucket(span, defaults.chunk_batch(chunk, most_pieces(chunk)), chunk)
        for span, chunk in product(cuts[: last + 1], defaults.chunks)
    )
    return BucketGrid(
        max_length=max_length,
        prefill=tuple(prefill),
        decode_slots=round_up(slots, defaults.slot_multiple),
        decode_spans=tuple(sorted({*cuts, max_length})),
        steps_per_call=defaults.steps_per_call,
        score=score,
    )


def _spans(expected: int, max_length: int, defaults: GridDefaults) -> tuple[int, ...]:
    """Spans in equal steps up to the expected length, and one span for longer rows."""
    step = math.lcm(SPAN_STEP, defaults.span_multiple)
    count = max(1, defaults.max_decode_graphs - (max_length > expected))
    steps = {min(round_up(max(1, expected * i // count), step), expected) for i in range(1, count)}
    return tuple(sorted(steps | {expected, max_length}))


def ladder_grid(
    max_length: int, slots: int, *, score: bool, defaults: GridDefaults | None = None
) -> BucketGrid:
    """A grid for unknown requests: prefill lengths that double up to `max_length`, or chunks."""
    defaults = defaults or GridDefaults()
    max_length = defaults.longest_span(max_length)
    if defaults.chunks:
        return _chunk_grid(max_length, max_length, max_length, slots, slots, score, defaults)
    length = defaults.longest_prefill(max_length)
    lengths = [length]
    while length > 2 * defaults.length_step and len(lengths) < defaults.max_prefill_graphs:
        length = round_up(length // 2, defaults.length_step)
        lengths.append(length)
    return BucketGrid(
        max_length=max_length,
        prefill=tuple(
            PrefillBucket(
                length,
                round_up(
                    max(1, min(defaults.tokens_per_prefill // length, slots)),
                    defaults.batch_multiple,
                ),
            )
            for length in sorted(set(lengths))
        ),
        decode_slots=round_up(slots, defaults.slot_multiple),
        decode_spans=_spans(max_length, max_length, defaults),
        steps_per_call=defaults.steps_per_call,
        score=score,
    )
