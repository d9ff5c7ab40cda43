"""Judges whether so many slots are idle that a prefill batch runs although it is not full.

A slot is idle unless it decodes or holds a shared prefix. In a grid with pages, a row may find a
slot but no pages, so idle pages count like idle slots.

Pure state. Does not know the order of batches. Guarantees: the judgement changes with calls alone.
"""

from ...compile.grids.bucket_grid import BucketGrid
from .decode_slots import DecodeSlots
from .held_prefixes import HeldPrefixes
from .waiting_prompts import Prompt

IDLE_SHARE = 1 / 16
"""A batch that is not full runs if this share of the slots for its oldest prompt is idle."""
PACKED_IDLE_SHARE = 1 / 8
"""The same share in a packed grid, where fewer prompts fill a call, so that fewer slots wait."""
FEW_SLOTS = 1 / 4
"""Share of all slots below which the slots that a prompt can use count as few."""
MANY_IDLE = 1 / 4
"""Idle share of few slots above which a batch for these slots runs as if it were full, because
perhaps no other prompts come to fill it. If most slots can hold a prompt, later prompts fill the
batch."""
MOST_IDLE = 1 / 2
"""Idle share of the slots above which a batch runs as if it were full while prompts wait for shared
prefixes. These prompts come only after more prefill calls, and a decode call would compute few
rows."""


class IdleSlots:
    """The idle slots that a batch can use."""

    def __init__(self, grid: BucketGrid, slots: DecodeSlots, prefixes: HeldPrefixes):
        self._grid, self._slots, self._prefixes = grid, slots, prefixes

    def has_many(self, oldest: Prompt) -> bool:
        """Whether so many slots are idle that a batch with this oldest prompt counts as full."""
        length = oldest.max_total_length
        idle, usable = self._slots.num_idle(length), self._slots.num_usable(length)
        has_few = usable < FEW_SLOTS * len(self._slots)
        if has_few and idle > MANY_IDLE * usable:
            return True
        has_most = idle > MOST_IDLE * usable and self._has_pages(MOST_IDLE)
        return self._prefixes.num_blocked > 0 and has_most

    def has_enough(self, oldest: Prompt) -> bool:
        """Whether a batch with this oldest prompt need not wait for more idle slots."""
        length = oldest.max_total_length
        idle, usable = self._slots.num_idle(length), self._slots.num_usable(length)
        share = PACKED_IDLE_SHARE if self._grid.is_packed else IDLE_SHARE
        return idle >= share * usable and self._has_pages(share)

    def _has_pages(self, share: float) -> bool:
        """Whether this share of the pages is idle; true in a grid without pages."""
        pages = self._grid.pages
        return pages is None or self._slots.num_idle_pages >= share * pages
