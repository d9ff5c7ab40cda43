"""Finds the beginnings that the prompts of a job share, while the job is scanned.

Prompts are compared in units of a few tokens. The search keeps one hash for each unit of a prompt,
of all tokens up to the end of the unit. If there are too many hashes, it drops every second one and
compares in units twice as long, so that memory is bounded. Two different beginnings may have equal
hashes, so users of the table must compare the tokens.

Scored prompts share with scored prompts only, and only with those that ask for the same number of
alternatives. They share a beginning only if they also have the next token in common, because the
last position of the beginning gives the log-probability of that token.

Knows nothing of grids or of the meaning of a row. Guarantees: the table depends on the prompts
alone, and is the same in every process.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from ...compile.grids.prefix_grid import begin_hash
from ...compile.grids.prefix_table import PrefixTable

UNIT = 16
"""Tokens of a unit, if memory suffices: the smallest usual chunk."""
MAX_HASHES = 2**25
"""Maximum number of hashes of 8 bytes."""
_BLOCK_HASHES = 2**20
_UINT32, _UINT64 = "I", "Q"


class PrefixIndex:
    """Collects the hashes of prompts; `table` ends the search."""

    def __init__(self, max_hashes: int = MAX_HASHES):
        self._max_hashes = max_hashes
        self._unit = UNIT
        self._rows = array(_UINT32)
        self._blocks: list[tuple[np.ndarray, np.ndarray]] = []
        """For each block of rows: the hashes, and how many of them each row has."""
        self._hashes, self._counts = array(_UINT64), array(_UINT32)
        """The same, for rows that are in no block yet."""
        self._num_hashes = 0

    def add(
        self,
        row: int,
        ids: Sequence[int],
        num_alternatives: int | None = None,
        adapter: str | None = None,
    ) -> None:
        """Add a row's prompt.

        Args:
          row: The number of the row.
          ids: The prompt.
          num_alternatives: The alternatives to each token of a scored prompt; None for others.
          adapter: The name of the row's adapter. Rows of different adapters share nothing.
        """
        data = memoryview(array(_UINT32, ids)).cast("B")
        state, digests = begin_hash(adapter), bytearray()
        if num_alternatives is not None:
            state.update(b"scored %d" % num_alternatives)
            # units are counted from the second token, so the hash of a beginning includes the token
            # after it
            state.update(data[:4])
            data = data[4:]
        step = self._unit * 4
        count = len(data) // step
        for start in range(0, count * step, step):
            state.update(data[start : start + step])
            digests += state.copy().digest()
        self._rows.append(row)
        self._hashes.frombytes(bytes(digests))
        self._counts.append(count)
        self._num_hashes += count
        if len(self._hashes) >= min(_BLOCK_HASHES, self._max_hashes):
            self._close_block()
        while self._num_hashes > self._max_hashes:
            self._double_unit()

    def table(self) -> PrefixTable:
        """The table of all rows that were added; the hashes are dropped."""
        self._close_block()
        hashes, counts = np.empty(self._num_hashes, np.uint64), []
        end = 0
        self._blocks.reverse()
        while self._blocks:
            # each block is freed before the next one fills new memory
            block, block_counts = self._blocks.pop()
            hashes[end : end + len(block)] = block
            end += len(block)
            counts.append(block_counts)
        counts = np.concatenate([np.zeros(0, np.int64), *counts])
        order, units = _order_and_units(hashes, counts)
        last = np.maximum((np.cumsum(counts) - counts)[order] + units - 1, 0)
        shared_hashes = np.where(units > 0, hashes[last], 0) if len(hashes) else hashes
        return PrefixTable(
            np.array(self._rows, np.int32)[order],
            (units * self._unit).astype(np.int32),
            shared_hashes.astype(np.uint64),
        )

    def _close_block(self) -> None:
        if self._counts:
            counts = np.array(self._counts, np.int64)
            self._blocks.append((np.array(self._hashes, np.uint64), counts))
            self._hashes, self._counts = array(_UINT64), array(_UINT32)

    def _double_unit(self) -> None:
        """Keep every second hash of each row."""
        self._close_block()
        self._unit *= 2
        for i, (hashes, counts) in enumerate(self._blocks):
            starts = np.cumsum(counts) - counts
            number = np.arange(len(hashes)) - np.repeat(starts, counts)
            self._blocks[i] = hashes[number % 2 == 1], counts // 2
        self._num_hashes = sum(len(hashes) for hashes, _ in self._blocks)


def _order_and_units(hashes: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Order rows so that equal beginnings are neighbours.

    The rows are split by their first hash, then each group of equal rows by its second hash, and so
    on. A prompt that is the beginning of another one comes before it.

    Args:
      hashes: The hashes of all rows, one row after another.
      counts: The number of hashes of each row.

    Returns:
      The rows in order, and the units that each one shares with the row before it.
    """
    starts = np.cumsum(counts) - counts
    order = np.arange(len(counts))
    units = np.zeros(len(counts), np.int64)
    places, groups = order.copy(), np.zeros(len(counts), np.int64)
    level = 0
    while len(places):
        rows = order[places]
        has_more = counts[rows] > level
        keys = np.zeros(len(rows), np.uint64)
        keys[has_more] = hashes[starts[rows[has_more]] + level]
        is_first = np.r_[True, groups[1:] != groups[:-1]]
        is_equal = ~is_first & has_more & np.r_[False, (keys[1:] == keys[:-1]) & has_more[:-1]]
        if not (is_equal | is_first).all():
            by_key = np.lexsort((keys, has_more, groups))
            order[places] = rows[by_key]
            keys, has_more = keys[by_key], has_more[by_key]
            is_equal = ~is_first & has_more & np.r_[False, (keys[1:] == keys[:-1]) & has_more[:-1]]
        units[places[is_equal]] = level + 1
        # rows that are equal to a neighbour stay
        stays = is_equal | np.r_[is_equal[1:], False]
        groups = np.cumsum(~is_equal)[stays]
        places = places[stays]
        level += 1
    return order, units
