"""Judges whether so many slots are idle that a prefill batch runs although it is not full.

A slot is idle unless it decodes or holds a shared prefix. A row may find a slot but no pages, so
idle pages count like idle slots.

Pure state. Does not know the order of batches. Guarantees: the judgement changes with calls alone.
"""

from ...compile.grids.bucket_grid import BucketGrid
from .decode_slots import DecodeSlots
from .held_prefixes import HeldPrefixes

IDLE_SHARE = 1 / 16
"""A batch of whole prompts that is not full runs if this share of the slots is idle."""
CHUNK_IDLE_SHARE = 1 / 8
"""The same share with chunks, where fewer prompts fill a call, so that fewer slots wait."""
MOST_IDLE = 1 / 2
"""Idle share of the slots above which a batch runs as if it were full while prompts wait for shared
prefixes. These prompts come only after more prefill calls, and a decode call would compute few
rows."""


class IdleSlots:
    """The idle slots that a batch can use."""

    def __init__(self, grid: BucketGrid, slots: DecodeSlots, prefixes: HeldPrefixes):
        self._grid, self._slots, self._prefixes = grid, slots, prefixes

    @property
    def has_many(self) -> bool:
        """Whether so many slots are idle that a batch counts as full."""
        has_most = self._slots.num_idle > MOST_IDLE * len(self._slots)
        return self._prefixes.num_blocked > 0 and has_most and self._has_pages(MOST_IDLE)

    @property
    def has_enough(self) -> bool:
        """Whether a batch need not wait for more idle slots."""
        share = CHUNK_IDLE_SHARE if self._grid.chunks else IDLE_SHARE
        return self._slots.num_idle >= share * len(self._slots) and self._has_pages(share)

    def _has_pages(self, share: float) -> bool:
        """Whether this share of the pages is idle."""
        pages = self._grid.pages
        return pages is None or self._slots.num_idle_pages >= share * pages
