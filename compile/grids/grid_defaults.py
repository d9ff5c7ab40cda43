"""Aims of derived and planned grids.

Knows nothing of models, devices or rows.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...modelzoo import axes
from ...modelzoo.errors import UserError
from .grid_values import DEFAULT_PAGE, Count

if TYPE_CHECKING:
    from ...sharding.layout import Layout

LENGTH_STEP = 16
ACCELERATOR_TOKENS, ACCELERATOR_SLOTS = 2048, 512
"""Tokens of a prefill call and slots on an accelerator. Products of fewer rows leave its matrix
units idle, and every call has a cost of its own."""


@dataclass(frozen=True)
class GridDefaults:
    """Aims of a derived grid; a plan or `--set buckets.*` overrides the outcome."""

    tokens_per_prefill: int = 512
    """Tokens of one prefill call: enough to fill a CPU's units, few enough to waste little."""
    max_prefill_graphs: int = 6
    max_decode_slots: int = 64
    steps_per_call: int = 8
    unspecified_output: int = 512
    """Expected number of output tokens of a row without `max_tokens`."""
    max_length: int | None = None
    """Maximum total length of a row; None to derive it from the rows."""
    cache_share: float = 1 / 2
    """Share of the accelerator memory beside the weights that the cache may take, so that rows
    without `max_tokens` continue beyond the expected output. Graphs need the rest."""
    cpu_cache_share: float = 1 / 8
    """The same share on a CPU, where other programs run and the cache is filled before the first
    row."""
    batch_multiple: int = 1
    """Prefill batches are multiples of this number of pieces, into which a layout splits rows."""
    slot_multiple: int = 1
    slot_groups: int = 1
    """The groups of slots on different devices."""
    whole_lengths: int = LENGTH_STEP
    """Lengths of prompts are rounded up to a multiple of this number."""
    length_multiple: int = 1
    """Prefill lengths are multiples of this number."""
    page_multiple: int = 1
    """Chunks and prefixes are multiples of this number, into which a layout splits entries."""
    keeps_slots: bool = False
    """Whether a grid has decode slots even if all rows are only scored."""
    page: int = DEFAULT_PAGE
    """The entries of a page of the cache."""
    chunks: tuple[int, ...] = ()
    """Chunk sizes, growing; empty for a ladder of whole-prompt buckets."""

    @classmethod
    def for_layout(
        cls, layout: "Layout | None", platform: str = "cpu", cache_codes: str | None = None
    ) -> "GridDefaults":
        """Aims for shapes that a layout can split evenly.

        Tokens and slots are those of one device times the pieces into which the layout splits rows.

        Args:
          layout: The layout; None for one device.
          platform: `cpu`, `gpu` or `tpu`.
          cache_codes: The codes of the cache; None for float entries.
        """
        # the kernel for TPU reads scales of whole vectors
        page = axes.LANES if platform == "tpu" and cache_codes is not None else DEFAULT_PAGE
        tokens, slots = cls.tokens_per_prefill, cls.max_decode_slots
        if platform != "cpu":
            tokens, slots = ACCELERATOR_TOKENS, ACCELERATOR_SLOTS
        if layout is None:
            return cls(tokens_per_prefill=tokens, max_decode_slots=slots, page=page)
        prefill, decode = layout.phase("prefill"), layout.phase("decode")
        rows = (axes.BATCH, axes.ATTENTION_BATCH, axes.RESIDUAL_BATCH)
        shards = layout.mesh.num_shards
        replicas = [shards(rules[axes.BATCH]) for rules in (prefill, decode)]
        return cls(
            tokens_per_prefill=tokens * replicas[0],
            max_decode_slots=slots * replicas[1],
            batch_multiple=math.lcm(*(shards(prefill[axis]) for axis in rows)),
            slot_multiple=math.lcm(*(shards(decode[axis]) for axis in rows)),
            slot_groups=shards(decode[axes.ATTENTION_BATCH]),
            length_multiple=shards(prefill[axes.RESIDUAL_LENGTH]),
            page_multiple=(stripes := shards(decode[axes.CACHE_LENGTH])),
            page=max(page, stripes),
        )

    @property
    def length_step(self) -> int:
        """Lengths of prefill buckets are multiples of this."""
        return math.lcm(self.whole_lengths, self.length_multiple, *self.chunks)

    def chunk_batch(self, chunk: int, most_rows: int) -> int:
        """Rows of a call of chunks: enough to reach `tokens_per_prefill`, if there are as many.

        With several chunk sizes each one gets an equal share of the rows, as a row waits only for
        rows of its own size.
        """
        rows = max(1, min(self.tokens_per_prefill // chunk, most_rows // len(self.chunks)))
        return round_up(rows, self.batch_multiple)

    def longest_prefill(self, max_length: int) -> int:
        """The longest prefill bucket of a grid; ValueError if `max_length` is too short for one."""
        multiple = self.length_multiple
        if max_length < multiple:
            raise UserError(
                f"max_length: expected at least {multiple}, the pieces that the layout splits a "
                f"row's tokens into, got {max_length}. Plan longer rows, or change the rule of "
                f"residual_length."
            )
        return max_length // multiple * multiple


def round_up(value: Count, step: int) -> Count:
    """The smallest multiple of `step` that is at least the value, also for arrays."""
    return -(-value // step) * step
