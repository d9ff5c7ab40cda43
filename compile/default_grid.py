"""A grid derived from the lengths of a job, for when no plan is given.

Knows nothing of models or devices. The prefill lengths are those of least cost, padding and graphs
together, over lengths that are multiples of `LENGTH_STEP`.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, TypeVar

import numpy as np

from ..modelzoo import axes
from ..sharding.layout import PHASES, Layout
from .bucket_grid import BucketGrid, PrefillBucket, check_count, chunk_sizes
from .bucket_search import cheapest_cuts
from .span_slots import NO_LIMIT, SlotUse

LENGTH_STEP = 16
SPAN_STEP = 64
SLOTS_PER_PREFILL_ROW = 16
"""The fewest slots for each row of a call of whole prompts."""
MOST_BORDERS = 512
"""The largest number of lengths that prefill buckets are chosen from: all up to 8192 tokens."""


@dataclass(frozen=True)
class GridDefaults:
    """What a derived grid aims for; a plan or `--set buckets.*` overrides the outcome."""

    tokens_per_prefill: int = 512
    """Tokens of one prefill call: enough to fill the matrix units, short enough to waste little."""
    max_prefill_graphs: int = 6
    tokens_per_graph: int = 512
    """What one more prefill graph must save: its compile and its slow first call, in tokens."""
    max_decode_slots: int = 64
    max_decode_graphs: int = 3
    """The number of decode graphs; one is for rows beyond the expected length, if any may come."""
    steps_per_call: int = 8
    unspecified_output: int = 512
    """The expected number of output tokens of a row without `max_tokens`."""
    max_length: int | None = None
    """The longest prompt and output together; if it is None, the rows decide it."""
    cache_share: float = 1 / 2
    """The share that the cache may take of the accelerator memory beside the weights, so that rows
    without `max_tokens` go on beyond the expected output. Graphs need the rest."""
    cpu_cache_share: float = 1 / 8
    """The share on a CPU, where other programs run and the cache is filled before the first row."""
    batch_multiple: int = 1
    """Prefill batches are multiples of it: the pieces that a layout splits rows into."""
    slot_multiple: int = 1
    length_multiple: int = 1
    """Prefill lengths are multiples of it."""
    span_multiple: int = 1
    """Spans are multiples of it."""
    keeps_slots: bool = False
    """Whether a grid has decode slots even if all rows are only scored."""
    chunks: tuple[int, ...] = ()
    """Tokens of pieces of prompts, growing; without any, a ladder of whole-prompt buckets."""

    @classmethod
    def for_layout(cls, layout: Layout | None) -> "GridDefaults":
        """Shapes that divide as a layout splits them; tokens and slots as for one device, times
        the pieces that the rows fall into."""
        if layout is None:
            return cls()
        prefill, decode = (layout.phase(phase) for phase in PHASES)
        rows = (axes.BATCH, axes.ATTENTION_BATCH, axes.RESIDUAL_BATCH)
        shards = layout.mesh.num_shards
        replicas = [shards(rules[axes.BATCH]) for rules in (prefill, decode)]
        return cls(
            tokens_per_prefill=cls.tokens_per_prefill * replicas[0],
            max_decode_slots=cls.max_decode_slots * replicas[1],
            batch_multiple=math.lcm(*(shards(prefill[axis]) for axis in rows)),
            slot_multiple=math.lcm(*(shards(decode[axis]) for axis in rows)),
            length_multiple=shards(prefill[axes.RESIDUAL_LENGTH]),
            span_multiple=shards(decode[axes.CACHE_LENGTH]),
        )

    @property
    def length_step(self) -> int:
        """Lengths of prefill buckets are multiples of this."""
        return math.lcm(LENGTH_STEP, self.length_multiple, *self.chunks)

    def chunk_batch(self, chunk: int, most_rows: int) -> int:
        """Rows of a call of chunks: as many as make a whole one, where there are so many.

        Of several sizes each has its share, as a row waits for those of its size alone.
        """
        rows = max(1, min(self.tokens_per_prefill // chunk, most_rows // len(self.chunks)))
        return round_up(rows, self.batch_multiple)

    def longest_prefill(self, max_length: int) -> int:
        """The longest prefill bucket of a grid; ValueError where no length divides."""
        split = "a row's tokens", "residual_length"
        return _longest_multiple(max_length, self.length_multiple, *split)

    def longest_span(self, max_length: int) -> int:
        """The longest span of a grid; ValueError where none divides."""
        return _longest_multiple(max_length, self.span_multiple, "the cache", "cache_length")


@dataclass(frozen=True)
class RowNeed:
    """One admissible row of a job, as the scan saw it."""

    prompt_length: int
    max_tokens: int | None
    num_sequences: int = 1
    is_scored: bool = False

    def num_slots(self, *, has_chunks: bool) -> int:
        """Slots that it takes: a prompt in chunks takes one even if nothing follows it."""
        return int(has_chunks) if self.max_tokens == 0 else self.num_sequences

    @property
    def is_only_scored(self) -> bool:
        """Whether it needs no slot where prompts run whole."""
        return self.is_scored and self.max_tokens == 0

    @property
    def least_length(self) -> int:
        """Positions without which the row cannot run."""
        return self.prompt_length + (1 if self.max_tokens is None else self.max_tokens)


def derive_grid(
    rows: Sequence[RowNeed],
    max_position: int,
    defaults: GridDefaults | None = None,
    fits: Callable[[int, int], bool] | None = None,
) -> BucketGrid:
    """The default grid of a job: least prefill padding, and slots and spans for its rows.

    It has no slots if all rows are only scored, in whole prompts.

    Args:
        rows: The rows that can run.
        max_position: The model's context.
        defaults: The sizes to aim for.
        fits: Tells whether a cache with this many slots and positions may be kept. Rows without
            `max_tokens` may go on as far as it fits, and at least to their expected length.
    """
    defaults = defaults or GridDefaults()
    # rows that no grid for this model can hold will be refused, and must not stretch it
    rows = [row for row in rows if row.least_length <= max_position] or [RowNeed(1, 1)]
    num_slots = sum(row.num_slots(has_chunks=bool(defaults.chunks)) for row in rows)
    slots = max(1, min(defaults.max_decode_slots, num_slots))
    expected = _expected_length(rows, max_position, defaults)
    max_length = expected
    if defaults.max_length is not None:
        max_length = defaults.longest_span(defaults.max_length)
    elif fits is not None and any(row.max_tokens is None for row in rows):
        room = partial(fits, round_up(slots, defaults.slot_multiple))
        max_length = max(expected, _longest_that_fits(room, max_position, defaults))
    expected = min(expected, max_length)
    lengths = [row.prompt_length for row in rows]
    score = any(row.is_scored for row in rows)
    if defaults.chunks:
        most_rows = min(slots, len(rows))
        return _chunk_grid(expected, max_length, max(lengths), slots, most_rows, score, defaults)
    has_slots = defaults.keeps_slots or not all(row.is_only_scored for row in rows)
    return BucketGrid(
        max_length=max_length,
        prefill=with_small_calls(
            cheapest_prefill(lengths, max_length, defaults), slots, num_slots, defaults
        ),
        decode_slots=round_up(slots, defaults.slot_multiple) if has_slots else 0,
        decode_spans=_spans(expected, max_length, defaults) if has_slots else (),
        steps_per_call=defaults.steps_per_call,
        score=score,
    )


def _expected_length(rows: Sequence[RowNeed], max_position: int, defaults: GridDefaults) -> int:
    """The length of the longest row, if rows without `max_tokens` emit the expected output."""
    unlimited = defaults.unspecified_output
    wanted = max(
        row.prompt_length + unlimited if row.max_tokens is None else row.least_length
        for row in rows
    )
    return defaults.longest_span(min(round_up(wanted, defaults.length_step), max_position))


def _longest_that_fits(
    room: Callable[[int], bool], max_position: int, defaults: GridDefaults
) -> int:
    """The model's context if its cache fits, else the most whole span steps that fit."""
    if room(longest := defaults.longest_span(max_position)):
        return longest
    step = math.lcm(SPAN_STEP, defaults.span_multiple)
    return step * bisect_left(range(1, longest // step + 1), True, key=lambda n: not room(n * step))


def slot_use(rows: Sequence[RowNeed], *, has_chunks: bool) -> SlotUse:
    """What rows need of slots, if each takes all that it may."""
    counts = [row.num_slots(has_chunks=has_chunks) for row in rows]
    return SlotUse(
        np.array([row.prompt_length for row in rows], int),
        np.array([NO_LIMIT if row.max_tokens is None else row.max_tokens for row in rows], int),
        np.array(counts, int),
    )


def with_chunk(defaults: GridDefaults, chunk: Any) -> GridDefaults:
    """Defaults for prompts in chunks, where `chunk` is what a user gave: a number, or several."""
    return replace(defaults, chunks=chunk_sizes(chunk))


def with_asked(defaults: GridDefaults, asked: Any) -> GridDefaults:
    """The defaults with the user's `chunk` and `max_length`, from which spans are derived.

    Raises:
        ValueError: `asked` is not a table, or the value of one of these keys is invalid.
    """
    if not isinstance(asked, Mapping):
        raise ValueError(
            f"buckets: expected a table, got {asked!r}. Set one key, as in buckets.max_length=1024."
        )
    if "chunk" in asked:
        defaults = with_chunk(defaults, asked["chunk"])
    if {"decode_slots", "decode_spans", "span_slots"} & set(asked):
        defaults = replace(defaults, keeps_slots=True)
    if "max_length" in asked:
        check_count("buckets.max_length", asked["max_length"])
        defaults = replace(defaults, max_length=asked["max_length"])
    return defaults


def _chunk_grid(
    expected: int,
    max_length: int,
    longest_prompt: int,
    slots: int,
    most_rows: int,
    score: bool,
    defaults: GridDefaults,
) -> BucketGrid:
    """Spans of whole chunks up to the expected length; the last span covers the rest."""
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
    needed = min(round_up(longest_prompt, defaults.chunks[0]), whole)
    last = next(i for i, span in enumerate(cuts) if needed <= span)
    prefill = (
        PrefillBucket(span, defaults.chunk_batch(chunk, most_rows), chunk)
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


def prefill_padding(rows: Sequence[int], buckets: Sequence[PrefillBucket]) -> tuple[int, int]:
    """Real and computed prefill tokens of these prompts, partly filled batches included.

    With chunks, batches count as full: which chunks meet in one shows when rows run.
    """
    if (chunk := buckets[0].chunk) is not None:
        return sum(rows), sum(round_up(length, chunk) for length in rows)
    counts = dict.fromkeys(buckets, 0)
    for length in rows:
        counts[next(bucket for bucket in buckets if length <= bucket.length)] += 1
    computed = sum(-(-count // b.batch) * b.batch * b.length for b, count in counts.items())
    return sum(rows), computed


def _num_tokens(bucket: PrefillBucket) -> float:
    return bucket.batch * bucket.length


def cheapest_prefill(
    lengths: Sequence[int] | np.ndarray,
    max_length: int,
    defaults: GridDefaults,
    price: Callable[[PrefillBucket], float] = _num_tokens,
    price_of_graph: float | None = None,
) -> list[PrefillBucket]:
    """Prefill buckets of least cost of calls and graphs together, for prompts of these lengths.

    `price` is of one call, `price_of_graph` of building one; by default both are in tokens.
    """
    if price_of_graph is None:
        price_of_graph = defaults.tokens_per_graph
    longest = defaults.longest_prefill(max_length)
    steps = np.minimum(round_up(np.array(lengths), defaults.length_step), longest)
    borders, counts = np.unique(_thinned(steps), return_counts=True)
    rows_below = np.concatenate([[0], np.cumsum(counts)])

    def of_sizes(end: int, first: int | slice) -> tuple[list[int], np.ndarray]:
        """Batch sizes of the bucket that ends at a border, and what each costs by first border."""
        rows = np.atleast_1d(rows_below[end + 1] - rows_below[first])
        length = int(borders[end])
        sizes = _batch_sizes(length, defaults)
        costs = [
            np.where(
                _may_have(size, length, rows, defaults),
                -(-rows // size) * price(PrefillBucket(length, size)),
                np.inf,
            )
            for size in sizes
        ]
        return sizes, np.array(costs)

    ends = cheapest_cuts(
        lambda end: of_sizes(end, slice(end + 1))[1].min(axis=0),
        len(borders),
        defaults.max_prefill_graphs,
        price_of_graph,
    )
    buckets = []
    for first, end in zip([0, *(end + 1 for end in ends)], ends, strict=False):
        sizes, costs = of_sizes(end, first)
        buckets.append(PrefillBucket(int(borders[end]), sizes[int(costs[:, 0].argmin())]))
    return buckets


def with_small_calls(
    buckets: Sequence[PrefillBucket], slots: int, num_sequences: int, defaults: GridDefaults
) -> tuple[PrefillBucket, ...]:
    """Buckets of calls of at most 1 / `SLOTS_PER_PREFILL_ROW` of the slots, if rows wait for slots.

    Every row of a call takes its slot as the call begins, so many slots would idle until there are
    enough for a large call.
    """
    if num_sequences <= slots:
        return tuple(buckets)
    most = round_up(max(1, slots // SLOTS_PER_PREFILL_ROW), defaults.batch_multiple)
    return tuple(bucket._replace(batch=min(bucket.batch, most)) for bucket in buckets)


def _thinned(lengths: np.ndarray) -> np.ndarray:
    """The lengths, each rounded up to one of at most `MOST_BORDERS`; the longest one is kept."""
    borders = np.unique(lengths)
    every = -(-len(borders) // MOST_BORDERS)
    kept = borders[::-1][::every][::-1]
    return kept[np.searchsorted(kept, lengths)]


def _batch_sizes(length: int, defaults: GridDefaults) -> list[int]:
    """Batch sizes up to the target of tokens, largest first: of equal cost, fewest calls."""
    most = max(1, defaults.tokens_per_prefill // length)
    return sorted({round_up(n, defaults.batch_multiple) for n in range(1, most + 1)}, reverse=True)


def _may_have(size: int, length: int, rows: np.ndarray, defaults: GridDefaults) -> np.ndarray:
    """Whether a call of that size is between half of and the whole target of tokens.

    Fewer rows than that are one call of their own size, not a call of dummies.
    """
    most = max(1, defaults.tokens_per_prefill // length)
    half = -(-defaults.tokens_per_prefill // (2 * length))
    # at least one: rows too long for every bucket leave the last one empty
    least = np.maximum(1, np.minimum(np.minimum(half, rows), most))
    return np.minimum(size, most) >= least


def _spans(expected: int, max_length: int, defaults: GridDefaults) -> tuple[int, ...]:
    """Equal steps up to the expected length, and one span for rows that go further."""
    step = math.lcm(SPAN_STEP, defaults.span_multiple)
    count = max(1, defaults.max_decode_graphs - (max_length > expected))
    steps = {min(round_up(expected * i // count, step), expected) for i in range(1, count)}
    return tuple(sorted(steps | {expected, max_length}))


def _longest_multiple(max_length: int, multiple: int, what: str, axis: str) -> int:
    if max_length < multiple:
        raise ValueError(
            f"max_length: expected at least {multiple}, the pieces that the layout splits {what} "
            f"into, got {max_length}. Plan longer rows, or change the rule of {axis}."
        )
    return max_length // multiple * multiple


_Count = TypeVar("_Count", int, np.ndarray)


def round_up(value: _Count, step: int) -> _Count:
    """The least multiple of `step` that is no less than a value, or than each of an array."""
    return -(-value // step) * step


def ladder_grid(
    max_length: int, slots: int, *, score: bool, defaults: GridDefaults | None = None
) -> BucketGrid:
    """A grid for requests that are not known yet: prefill lengths doubling up to `max_length`, or
    chunks."""
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
