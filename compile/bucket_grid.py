"""The grid of static shapes that a plan fixes, and the fit of a request into it.

Knows nothing of models, devices or files. Guarantees: `fit` either names one prefill bucket, chosen
by the request alone, or raises `NoBucketFits`; nothing is ever truncated.

With `chunk`, a prompt is poured into its slot in pieces of that many tokens, and the lengths of
`prefill` are spans: each piece passes through the graph of the shortest span that holds its end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

CHUNKS_PER_DECODE = 32


class NoBucketFits(ValueError):
    """A request needs a shape that the plan does not have."""


class PrefillBucket(NamedTuple):
    """One prefill graph's shape: tokens per row, and rows."""

    length: int
    """Of prompts in chunks, the span: what a row sees of its slot, with its own tokens."""
    batch: int


@dataclass(frozen=True)
class BucketGrid:
    """All shapes of a plan: one batch size a prefill length, one slot count, nested spans."""

    max_length: int
    """Prompt and output together, per row."""
    prefill: tuple[PrefillBucket, ...]
    """By growing length; plain `(length, batch)` pairs are accepted."""
    decode_slots: int
    decode_spans: tuple[int, ...]
    """How much of the cache a decode graph reads; growing, the last is `max_length`."""
    steps_per_call: int = 8
    score: bool = False
    """Whether prefill graphs that also score every prompt token are built beside the plain ones."""
    chunk: int | None = None
    """Tokens of a piece of a prompt; None runs prompts whole."""
    chunks_per_decode: int | None = None
    """With `chunk`, the most calls that pour between two decode calls while a row decodes."""

    def __post_init__(self):
        buckets = tuple(_bucket(pair) for pair in _sequence("buckets.prefill", self.prefill))
        object.__setattr__(self, "prefill", buckets)
        spans = tuple(_sequence("buckets.decode_spans", self.decode_spans))
        object.__setattr__(self, "decode_spans", spans)
        lengths = [bucket.length for bucket in buckets]
        _check_growing("buckets.prefill lengths", lengths)
        _check_growing("buckets.decode_spans", self.decode_spans)
        for name, size in (
            ("buckets.decode_slots", self.decode_slots),
            ("buckets.steps_per_call", self.steps_per_call),
            *((f"buckets.prefill batch of length {b.length}", b.batch) for b in buckets),
        ):
            if not _is_count(size):
                raise ValueError(f"{name}: expected a positive integer, got {size!r}.")
        if not isinstance(self.score, bool):
            raise ValueError(f"buckets.score: expected true or false, got {self.score!r}.")
        self._check_chunk(lengths)
        if self.decode_spans[-1] != self.max_length:
            raise ValueError(
                f"buckets.decode_spans: expected the last span to be max_length "
                f"({self.max_length}), got {self.decode_spans[-1]}."
            )
        if lengths[-1] > self.max_length:
            raise ValueError(
                f"buckets.prefill: expected lengths of at most max_length ({self.max_length}), "
                f"got {lengths[-1]}."
            )

    def fit(self, prompt_length: int, max_tokens: int | None) -> PrefillBucket:
        """The bucket of a prompt; raises `NoBucketFits` when prompt or output is too long."""
        needed = self.computed_length(prompt_length)
        if needed <= self.prefill[-1].length:
            self._check_output(prompt_length, max_tokens)
            return self.bucket_of(needed)
        lengths = [bucket.length for bucket in self.prefill]
        chunks = "" if self.chunk is None else f", in whole chunks of {self.chunk}"
        raise NoBucketFits(
            f"the prompt needs prefill length {needed}{chunks}; "
            f"buckets.prefill has lengths {lengths}. Add a length of at least {needed}, "
            f"or shorten the prompt."
        )

    def bucket_of(self, end: int) -> PrefillBucket:
        """The bucket of a prompt of that length, or of the chunk that ends there."""
        return next(bucket for bucket in self.prefill if end <= bucket.length)

    def computed_length(self, prompt_length: int) -> int:
        """Positions that a prompt takes in the cache while it is poured in: whole chunks."""
        chunk = self.chunk or 1
        return -(-prompt_length // chunk) * chunk

    def tokens_per_row(self, bucket: PrefillBucket) -> int:
        """Tokens of a row of a bucket's calls."""
        return self.chunk or bucket.length

    def limit(self, prompt_length: int, max_tokens: int | None) -> int:
        """Length at which a row ends: its prompt and `max_tokens`, by default all that is left."""
        return self.max_length if max_tokens is None else prompt_length + max_tokens

    def span_of(self, length: int) -> int:
        """The shortest span that holds `length` positions."""
        return next(span for span in self.decode_spans if length <= span)

    def _check_chunk(self, spans: Sequence[int]) -> None:
        if self.chunk is None:
            if self.chunks_per_decode is not None:
                raise ValueError(
                    "buckets.chunks_per_decode: expected none without buckets.chunk, got "
                    f"{self.chunks_per_decode!r}. Give a chunk, or leave it out."
                )
            return
        if self.chunks_per_decode is None:
            object.__setattr__(self, "chunks_per_decode", CHUNKS_PER_DECODE)
        for name in ("chunk", "chunks_per_decode"):
            if not _is_count(size := getattr(self, name)):
                raise ValueError(f"buckets.{name}: expected a positive integer, got {size!r}.")
        first = self.decode_spans[: len(spans)]
        if tuple(spans) != first:
            raise ValueError(
                f"buckets.prefill: with buckets.chunk, expected the first of buckets.decode_spans "
                f"{list(self.decode_spans)}, where the cache is cut, got spans {list(spans)}. "
                f"Change either."
            )
        if uneven := [span for span in first if span % self.chunk]:
            raise ValueError(
                f"buckets.decode_spans: expected multiples of buckets.chunk ({self.chunk}) up to "
                f"the longest span of buckets.prefill ({spans[-1]}), so that a chunk lies in one "
                f"piece of the cache, got {uneven}. Change them, or the chunk."
            )

    def _check_output(self, prompt_length: int, max_tokens: int | None) -> None:
        needed = prompt_length + (1 if max_tokens is None else max_tokens)
        if needed > self.max_length:
            raise NoBucketFits(
                f"prompt ({prompt_length} tokens) and output ({needed - prompt_length}) need "
                f"{needed} positions; buckets.max_length is {self.max_length}. Raise max_length, "
                f"lower max_tokens, or shorten the prompt."
            )


def _sequence(name: str, values: object) -> Sequence[Any]:
    if not isinstance(values, tuple | list):
        raise ValueError(f"{name}: expected a list, got {values!r}.")
    return values


def _bucket(pair: object) -> PrefillBucket:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ValueError(f"buckets.prefill: expected pairs of length and batch, got {pair!r}.")
    return PrefillBucket(*pair)


def _is_count(value: object) -> bool:
    # bool is an int in Python; `decode_slots = true` is a mistake
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _check_growing(name: str, values: Sequence[int]) -> None:
    is_whole = all(_is_count(value) for value in values)
    if not values or not is_whole or not all(a < b for a, b in pairwise(values)):
        raise ValueError(f"{name}: expected growing positive integers, got {list(values)}.")
