"""Forecasts how far rows grow in a grid with pages, and orders them by age.

A row is expected to emit as many tokens as the sequences that ended so far did on average, and at
least those of one more call. Before any sequence ended, it is expected to reach its limit.

Pure state by slot. Does not know which pages are free, nor how prompts are queued. Guarantees: the
forecast depends on the lengths of sequences alone.
"""

import numpy as np

from ...compile.grids.bucket_grid import BucketGrid
from .actions import ScheduledRequest, ScheduledSequence


class Growth:
    """The sequences with a slot, whose prompts are prefilled or complete."""

    def __init__(self, grid: BucketGrid):
        self._grid = grid
        shape = (grid.decode_slots,)
        self._number_B, self._sample_B = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self._prompt_length_B = np.zeros(shape, np.int64)
        self._limit_B = np.zeros(shape, np.int64)
        """The lengths at which sequences end; 0 for a slot without one."""
        self._known_B = np.zeros(shape, np.int64)
        """The tokens that a sequence emitted before it gave its slot back."""
        self._num_ended = self._num_output = 0
        """The sequences that ended, and their tokens."""

    def is_empty_G(self, num_groups: int) -> np.ndarray:
        """Whether no sequence has a slot, for each of several equal groups of slots."""
        return (self._limit_B.reshape(num_groups, -1) == 0).all(axis=1)

    def begin(self, slot: int, sequence: ScheduledSequence, num_known: int) -> None:
        """Record that a sequence has a slot.

        Args:
          slot: The slot.
          sequence: The sequence.
          num_known: The tokens that it emitted before it gave another slot back.
        """
        request = sequence.request
        self._number_B[slot], self._sample_B[slot] = request.number, sequence.sample
        self._prompt_length_B[slot] = request.prompt_length
        self._limit_B[slot] = request.max_total_length
        self._known_B[slot] = num_known

    def leave(self, slot: int) -> None:
        """Record that no sequence has the slot any more."""
        self._limit_B[slot] = 0

    def end(self, slot: int, length: int) -> None:
        """Record that the sequence in a slot ended at a length."""
        self._num_ended += 1
        self._num_output += self.num_known(slot, length)
        self.leave(slot)

    def num_known(self, slot: int, length: int) -> int:
        """The tokens that a sequence of this length has emitted so far, before a replay too."""
        return max(int(self._known_B[slot]), length - int(self._prompt_length_B[slot]))

    def by_age(self, slots: np.ndarray) -> np.ndarray:
        """Slots with sequences, oldest first: by the number of the request, then by sample."""
        return slots[np.lexsort((self._sample_B[slots], self._number_B[slots]))]

    def expected_length_B(self, length_B: np.ndarray) -> np.ndarray:
        """The expected total length of the sequence in each slot, from its length now.

        It is 0 for a slot without a sequence.
        """
        if not self._num_ended:
            return self._limit_B
        emitted_B = np.maximum(length_B - self._prompt_length_B, self._known_B)
        output_B = np.maximum(emitted_B + self._grid.steps_per_call, self._mean_output)
        return np.minimum(self._prompt_length_B + output_B, self._limit_B)

    def expected_length(self, request: ScheduledRequest, num_known: int) -> int:
        """The expected total length of a sequence that has no slot yet.

        Args:
          request: Its request.
          num_known: The tokens that it emitted before it gave a slot back.
        """
        if not self._num_ended:
            return request.max_total_length
        output = max(self._mean_output, num_known + self._grid.steps_per_call)
        return min(request.max_total_length, request.prompt_length + output)

    @property
    def _mean_output(self) -> int:
        """The mean number of tokens of the sequences that ended, rounded up."""
        return -(-self._num_output // self._num_ended)
