"""The grid of static shapes that a plan fixes, and the fit of a request into it.

Without chunks, a prompt is prefilled whole, in the bucket of the shortest length that holds it.

With chunks, a prompt is prefilled in pieces. It is first cut into whole pieces of the largest
chunk, the rest into whole pieces of the next smaller chunk, and so on. Only a piece of the smallest
chunk is padded. With chunks of 16 and 256, a prompt of 530 tokens is prefilled in pieces of 256,
256, 16 and 2. A call may have several pieces of one prompt.

The cache is in pages, which rows take as they grow.

Knows nothing of models, devices or files. Guarantees: `fit` either returns one prefill bucket,
which depends on the request alone, or raises `NoBucketFits`; nothing is ever truncated.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from typing import Any

from ...modelzoo.config_values import check_count, is_count
from ...modelzoo.errors import UserError
from ...sharding.call import Call
from ..plan_tables import PlanTable, check_flag, check_keys, keys_of
from .adapter_grid import AdapterGrid
from .grid_values import (
    DEFAULT_PAGE,
    Count,
    check_growing,
    check_list,
    check_packed,
    check_page_size,
    check_row_tokens,
    check_slot_groups,
    chunk_sizes,
    window_pages,
)
from .prefill_bucket import PrefillBucket, as_bucket, distinct_lengths, entry_buckets
from .prefix_grid import PrefixGrid
from .structured_grid import StructuredGrid

CHUNKS_PER_DECODE = 32
MAX_SIZE = 2**31 - 1
"""The largest index on a device, which is a 32-bit integer."""
MAX_POSITIONS = 2**40
"""The largest product of rows and length in a graph; its arrays then have under 2**63 bytes."""


class NoBucketFits(UserError):
    """A request needs a shape that the plan does not have."""


class NoDecodeSlots(NoBucketFits):
    """A request for output tokens, although the plan only scores prompts."""


@dataclass(frozen=True)
class BucketGrid(PlanTable, name="buckets"):
    """All shapes of a plan: those of prefill calls, and the slots and pages of rows that decode.

    In Python, entries of `prefill` may be plain `(length, batch)` or `(length, batch, chunk)`.
    """

    TABLES = (PrefixGrid, StructuredGrid, AdapterGrid)
    """The fields that are tables of their own in a plan, in the order of its file."""

    max_length: int
    """The longest row: prompt and output together. Unit: tokens."""
    prefill: tuple[PrefillBucket, ...]
    """The shapes of the prefill graphs, in order of length. Without `chunk`, each entry is
    `[length, batch]`. With `chunk`, there is one entry: `max_length`, followed by one batch for
    each chunk size, as `[512, 32, 2]` for two sizes. Unit: tokens, then rows."""
    decode_slots: int
    """The rows of the decode batch. 0 means that the plan only scores or embeds whole prompts: it
    has no cache, and nothing decodes. Unit: slots."""
    steps_per_call: int = 8
    """The number of tokens that one decode call makes for each slot. Unit: steps."""
    score: bool = False
    """Whether each prefill shape has a graph that also computes the log-probability of every prompt
    token. In a plan with decode slots it is a second graph, else the only one."""
    embed: bool = False
    """Whether the prefill graphs return one vector for each text, and nothing else. Such a plan has
    no decode slots and does not score."""
    chunks_per_decode: int | None = None
    """With `chunk`, the maximum number of prefill calls between two decode calls while a row
    decodes. Without this key it is 32. Unit: calls."""
    slot_groups: int | None = None
    """The number of groups into which a layout splits the slots over devices. The groups are equal:
    each has the same number of slots and of pages. Without this key it is 1. Unit: groups."""
    pages: int | None = None
    """The number of pages of the cache. A row takes pages as it grows, wherever they are free, so
    rows hold what they need. Without this key, there are as many as all slots can fill. Unit:
    pages."""
    page: int | None = None
    """The entries of a page: a power of two. Without this key, pages have 64. Unit: positions."""
    row_tokens: int | None = None
    """The maximum number of tokens of one row in a prefill call of chunks; whole prompts need 1. In
    layers with a window, each slot then has pages of its own for the window and so many tokens, and
    uses them again and again. Without this key, these layers keep all tokens of a row, as others
    do. Unit: tokens."""
    prefixes: PrefixGrid | None = None
    """The prefixes whose pages a decode step reads once for several rows: the table `[prefixes]`.
    """
    structured: StructuredGrid | None = None
    """The forms that answers may have: the table `[structured]`."""
    adapters: AdapterGrid | None = None
    """The room for adapters, of which each row may use one: the table `[adapters]`."""

    def __post_init__(self):
        """Normalise the fields and check them; ValueError names the wrong key."""
        self._normalise()
        lengths = self._prefill_lengths
        check_growing("buckets.prefill lengths", lengths)
        only_scores = type(self.decode_slots) is int and self.decode_slots == 0
        slots = ("buckets.decode_slots", self.decode_slots, self.max_length)
        for name, size, length in (
            ("buckets.max_length", self.max_length, 1),
            *([] if only_scores else [slots]),
            ("buckets.steps_per_call", self.steps_per_call, self.decode_slots or 1),
            *(
                (f"buckets.prefill batch of length {b.length}", b.batch, b.length)
                for b in self.prefill
            ),
        ):
            check_count(name, size)
            if size > (max_size := min(MAX_SIZE, MAX_POSITIONS // length)):
                raise UserError(f"{name}: expected at most {max_size}, got {size}.")
        check_flag("buckets.score", self.score)
        check_flag("buckets.embed", self.embed)
        if self.embed and not only_scores:
            raise UserError(
                f"buckets.embed: expected false with decode slots, got true. Set "
                f"buckets.decode_slots = 0 instead of {self.decode_slots!r}."
            )
        if self.embed and self.adapters is not None:
            raise UserError(
                "plan [adapters]: expected none with buckets.embed, as texts are embedded without "
                "adapters, got one. Merge an adapter into the weights, with --merge-adapter."
            )
        if only_scores:
            self._check_without_slots()
        self._check_chunks(lengths)
        if not only_scores:
            self._check_pages()
        if self.prefixes is not None:
            self.prefixes.check_beside(self.chunks, self.page, self.slot_groups or 1)
        if self.structured is not None and only_scores:
            raise UserError(
                "plan [structured]: expected none without decode slots, got one. Remove it."
            )
        if lengths[-1] > self.max_length:
            raise UserError(
                f"buckets.prefill: expected lengths of at most max_length ({self.max_length}), "
                f"got {lengths[-1]}."
            )

    @classmethod
    def check(cls, table: Any) -> None:
        """Refuse the table `[buckets]` of a file if its keys are wrong; ValueError names them."""
        required, optional = keys_of(cls)
        own = {kind.NAME for kind in cls.TABLES}
        check_keys("[buckets]", table, required, optional - own | {"chunk"})

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> "BucketGrid":
        """Read the table of a plan, which has chunks in a key of their own.

        `chunk` is a number or a list such as `[16, 256]`. An entry of `prefill` then has one batch
        for each chunk: `[length, batch, batch]`. The values of tables of their own are objects. A
        value of None means that the key is left out.

        Raises:
          ValueError: A value is wrong; the error names its key.
        """
        fields = {key: value for key, value in table.items() if value is not None}
        chunk = fields.pop("chunk", None)
        chunks = () if chunk is None else chunk_sizes(chunk)
        entries = check_list("buckets.prefill", fields.pop("prefill"))
        prefill = tuple(b for entry in entries for b in entry_buckets(entry, chunks))
        return cls(prefill=prefill, **fields)

    def to_table(self) -> dict[str, Any]:
        """The table that `from_table` reads; a value of None means that the key is left out."""
        by_length = groupby(self.prefill, key=lambda bucket: bucket.length)
        entries = [[length, *(bucket.batch for bucket in group)] for length, group in by_length]
        table = asdict(replace(self, **{kind.NAME: None for kind in self.TABLES}))
        if not self.embed:
            # most plans do not
            del table["embed"]
        return table | {"prefill": entries, "chunk": self.chunks or None}

    def to_lines(self) -> list[str]:
        """The lines of the table, and of those fields that are tables of their own."""
        own = (getattr(self, kind.NAME) for kind in self.TABLES)
        return super().to_lines() + [line for table in own if table for line in table.to_lines()]

    @cached_property
    def chunks(self) -> tuple[int, ...]:
        """Sizes of the pieces in which prompts are prefilled, in growing order. Each is a multiple
        of the one before. Without this key, prompts are prefilled whole. Unit: tokens."""
        first_chunks = (b.chunk for b in self.prefill if b.length == self.prefill[0].length)
        return tuple(chunk for chunk in first_chunks if chunk is not None)

    @cached_property
    def _prefill_lengths(self) -> list[int]:
        return distinct_lengths(self.prefill)

    def fit(self, prompt_length: int, max_tokens: int | None) -> PrefillBucket:
        """Choose the bucket in which a prompt begins.

        Args:
          prompt_length: Tokens of the prompt.
          max_tokens: Maximum tokens of the output; None for all that `max_length` allows.

        Raises:
          NoBucketFits: The prompt or its output is too long; the error says by how much.
          NoDecodeSlots: The request wants output, and the plan has no slots.
        """
        if self.embed and max_tokens != 0:
            raise NoDecodeSlots(
                "the plan only embeds texts (buckets.embed = true). Ask for embeddings or scores, "
                "or make another plan."
            )
        if not self.decode_slots and max_tokens != 0:
            raise NoDecodeSlots(
                "the plan has no decode slots (buckets.decode_slots = 0), so it only scores "
                "prompts. Ask for max_tokens 0 with log-probabilities of the prompt, or plan slots."
            )
        if prompt_length <= self.prefill[-1].length:
            needed = prompt_length + (1 if max_tokens is None else max_tokens)
            if needed > self.max_length:
                raise NoBucketFits(
                    f"a prompt of length {prompt_length} and an output of "
                    f"{needed - prompt_length} need {needed} positions; buckets.max_length is "
                    f"{self.max_length}. Raise max_length, lower max_tokens, or shorten the prompt."
                )
            return self.bucket_of(prompt_length)
        remedy = f"add a length of at least {prompt_length}, or shorten the prompt."
        if prompt_length > self.max_length:
            remedy = f"raise max_length ({self.max_length}), {remedy}"
        raise NoBucketFits(
            f"the prompt needs prefill length {prompt_length}; buckets.prefill has lengths "
            f"{self._prefill_lengths}. {remedy[0].upper()}{remedy[1:]}"
        )

    def bucket_of(self, prompt_length: int, start: int = 0) -> PrefillBucket:
        """The bucket of a prompt, or of its piece that begins at `start`."""
        if self.chunks:
            return self.prefill[max(0, bisect_right(self.chunks, prompt_length - start) - 1)]
        return self.prefill[bisect_left(self._prefill_lengths, prompt_length)]

    def buckets_of(self, prompt_length: int) -> list[PrefillBucket]:
        """The bucket of every piece of a prompt, in order."""
        buckets, start = [], 0
        while start < prompt_length:
            bucket = self.bucket_of(prompt_length, start)
            buckets.append(bucket)
            start += bucket.tokens
        return buckets

    def num_alike(self, prompt_length: int, start: int, end: int) -> int:
        """The number of pieces of a prompt between two positions that may be in one call.

        They begin with the one at `start`, follow each other and have the same size. It is 1 in a
        grid that is not packed.
        """
        if not self.chunks:
            return 1
        left, tokens = prompt_length - start, self.bucket_of(prompt_length, start).tokens
        count = -(-left // tokens) if tokens == self.chunks[0] else left // tokens
        most = count if self.row_tokens is None else self.row_tokens // tokens
        return min(count, most, -(-(end - start) // tokens))

    def computed_length(self, prompt_length: int) -> int:
        """Positions that prefill of a prompt computes, padding included."""
        chunk = self.chunks[0] if self.chunks else 1
        return -(-prompt_length // chunk) * chunk

    def num_pages(self, length: Count) -> Count:
        """The pages that hold `length` positions, also for arrays."""
        assert self.page is not None
        return -(-length // self.page)

    def prefix_pages(self, length: int) -> int:
        """The number of whole pages that a group reads of a planned prefix of this length.

        Their tokens are in whole pieces of the largest chunk, whatever follows the prefix. So the
        rows of a group have computed them in the same graph, and their entries have equal bits.
        """
        assert self.prefixes is not None and self.page is not None
        alike = length // self.chunks[-1] * self.chunks[-1]
        return min(alike, self.prefixes.length) // self.page

    def whole_pages(self, length: Count) -> Count:
        """The entries of the pages that hold `length` positions."""
        assert self.page is not None
        return self.num_pages(length) * self.page

    @property
    def most_pages(self) -> int:
        """The pages that the longest rows fill in all slots; 0 in a grid without slots."""
        return 0 if self.page is None else self.decode_slots * self.num_pages(self.max_length)

    def window_pages(self, window: int) -> int | None:
        """The pages of its own that each slot has in a layer whose tokens see `window` positions;
        None if rows take pages of the pool there."""
        if self.row_tokens is None or self.page is None:
            return None
        return window_pages(window, self.row_tokens, self.page, self.max_length)

    def prefill_call(
        self, bucket: PrefillBucket, *, is_scored: bool = False, entries: float | None = None
    ) -> Call:
        """The shape of a call of a prefill graph.

        Args:
          bucket: The bucket of the graph.
          is_scored: Whether it is the graph that scores prompts.
          entries: With chunks, the entries that the pieces of a call read, on average; None for
            those of pieces at the end of the longest rows.
        """
        call = replace(bucket.call(), is_scored=is_scored, is_embedded=self.embed)
        if self.page is None or bucket.is_whole:
            return call
        if entries is None:
            entries = bucket.batch * self.whole_pages(self.max_length)
        return replace(call, entries=entries, page=self.page)

    def decode_call(self) -> Call:
        """The shape of a decode step that reads all pages."""
        assert self.pages is not None and self.page is not None
        return self.average_step(min(self.pages, self.most_pages) * self.page)

    def average_step(self, entries: float, seen: float | None = None) -> Call:
        """The shape of a decode step that reads so many entries.

        Args:
          entries: The entries in the pages that the step reads, on average.
          seen: The entries in the pages of all rows that decode, those that several rows share
            counted for each of them; None for the same number.
        """
        assert self.page is not None
        slots, span = self.decode_slots, self.max_length
        return Call("decode", slots, 1, span, entries=entries, seen=seen, page=self.page)

    def _normalise(self) -> None:
        """Turn lists into tuples, and set the defaults that depend on other fields."""
        assign = partial(object.__setattr__, self)
        assign("prefill", tuple(map(as_bucket, check_list("buckets.prefill", self.prefill))))
        if self.chunks and self.chunks_per_decode is None:
            assign("chunks_per_decode", CHUNKS_PER_DECODE)
        if is_count(self.decode_slots) and is_count(self.max_length):
            if self.page is None:
                assign("page", DEFAULT_PAGE)
            if self.pages is None and is_count(self.page):
                assign("pages", self.decode_slots * self.num_pages(self.max_length))

    def _check_without_slots(self) -> None:
        task = "embedded" if self.embed else "scored"
        for name, got, expected, shown in (
            ("pages", self.pages, None, "none"),
            ("page", self.page, None, "none"),
            ("row_tokens", self.row_tokens, None, "none"),
            ("slot_groups", self.slot_groups, None, "none"),
            ("score", self.score, not self.embed, "false" if self.embed else "true"),
            ("chunk", self.chunks, (), "none, as prompts in chunks need a slot"),
        ):
            if got != expected:
                raise UserError(
                    f"buckets.{name}: with buckets.decode_slots = 0, by which prompts are only "
                    f"{task}, expected {shown}; got {got!r}. Change it, or plan decode slots."
                )

    def _check_pages(self) -> None:
        check_page_size(self.pages, self.page)
        assert self.pages is not None
        check_row_tokens(self.row_tokens, self.chunks)
        check_slot_groups(self.slot_groups, self.decode_slots, self.pages)
        groups, longest = self.slot_groups or 1, self.num_pages(self.max_length)
        if self.pages < groups * longest:
            of_groups = f" in each of {groups} buckets.slot_groups" if groups > 1 else ""
            raise UserError(
                f"buckets.pages: expected at least {groups * longest}, as a row of max_length "
                f"({self.max_length}) takes {longest} pages of {self.page}{of_groups}, got "
                f"{self.pages}. Give more pages, or lower max_length."
            )

    def _check_chunks(self, lengths: Sequence[int]) -> None:
        every = [(length, chunk) for length in lengths for chunk in self.chunks or [None]]
        if [(bucket.length, bucket.chunk) for bucket in self.prefill] != every:
            raise UserError(
                f"buckets.prefill: expected each of the lengths {list(lengths)} once, or once with "
                f"each chunk of {list(self.chunks)}, got {list(map(tuple, self.prefill))}."
            )
        if self.chunks:
            check_count("buckets.chunks_per_decode", self.chunks_per_decode)
            check_packed(lengths, chunk_sizes(self.chunks)[-1], self.max_length)
        elif self.chunks_per_decode is not None:
            raise UserError(
                "buckets.chunks_per_decode: expected none without buckets.chunk, got "
                f"{self.chunks_per_decode!r}. Give a chunk, or leave it out."
            )
