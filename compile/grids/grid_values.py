"""Checks of the values that a user gives for a grid of buckets.

Knows nothing of the use of these values. Guarantees: a wrong value raises a ValueError with its
key, the expected value and the actual one.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np

from ...modelzoo.config_values import MAX_COUNT, check_count, is_count
from ...modelzoo.errors import UserError

DEFAULT_PAGE = 64
"""The entries of a page of plans that do not say it: as many as the matrix units of accelerators
take at once."""
Count = TypeVar("Count", int, np.ndarray)


def chunk_sizes(value: Any) -> tuple[int, ...]:
    """Chunk sizes from a number or a list; ValueError if they are not valid."""
    sizes = tuple(value) if isinstance(value, tuple | list) else (value,)
    check_growing("buckets.chunk", sizes)
    if uneven := [size for less, size in pairwise(sizes) if size % less]:
        raise UserError(
            f"buckets.chunk: expected each to be a multiple of the one before, so that pieces "
            f"begin at multiples of their size, got {list(sizes)}, where {uneven} are none."
        )
    return sizes


def check_list(name: str, values: object) -> Sequence[Any]:
    """The values as given; ValueError unless they are a list."""
    if not isinstance(values, tuple | list):
        raise UserError(f"{name}: expected a list, got {values!r}.")
    return values


def check_growing(name: str, values: Sequence[int]) -> None:
    """Raise ValueError unless the values are growing positive integers, and at least one."""
    is_whole = all(is_count(value) for value in values)
    if not values or not is_whole or not all(a < b for a, b in pairwise(values)):
        is_large = any(isinstance(value, int) and value > MAX_COUNT for value in values)
        limit = f" up to {MAX_COUNT}" if is_large else ""
        raise UserError(f"{name}: expected growing positive integers{limit}, got {list(values)}.")


def check_slot_groups(groups: int | None, num_slots: int, pages: int) -> None:
    """Raise ValueError unless the groups divide the slots and the pages."""
    if groups is None:
        return
    check_count("buckets.slot_groups", groups)
    for name, size in (("decode_slots", num_slots), ("pages", pages)):
        if size % groups:
            raise UserError(
                f"buckets.{name}: expected a multiple of buckets.slot_groups ({groups}), so that "
                f"each group has the same number, got {size}. Change it."
            )


def check_page_size(pages: Any, page: Any) -> None:
    """Raise ValueError unless both are positive numbers and `page` is a power of two."""
    check_count("buckets.page", page)
    if page & (page - 1):
        raise UserError(f"buckets.page: expected a power of two, got {page}. Take 64, or another.")
    check_count("buckets.pages", pages)


def window_pages(window: int, row_tokens: int, page: int, max_length: int) -> int | None:
    """The pages that hold a window and so many new tokens of a row, wherever they begin.

    They are the pages of a slot in a layer whose tokens see `window` positions, itself included. It
    is None if a row of the greatest length has no more pages.
    """
    num_positions = window - 1 + row_tokens
    count = (num_positions + page - 2) // page + 1
    return count if count < -(-max_length // page) else None


def check_row_tokens(row_tokens: Any, chunks: Sequence[int]) -> None:
    """Raise ValueError unless it is None, or a number of whole chunks."""
    if row_tokens is None:
        return
    check_count("buckets.row_tokens", row_tokens)
    if chunks and row_tokens % chunks[-1]:
        raise UserError(
            f"buckets.row_tokens: expected a multiple of the largest buckets.chunk ({chunks[-1]}), "
            f"as a call has whole chunks of a row, got {row_tokens}. Change it."
        )


def check_packed(lengths: Sequence[int], longest_chunk: int, max_length: int) -> None:
    """Raise ValueError unless the lengths and the largest chunk suit a grid with chunks."""
    if list(lengths) != [max_length]:
        raise UserError(
            f"buckets.prefill: with buckets.chunk, by which rows of all lengths share calls, "
            f"expected one length, which is max_length: [[{max_length}, ...]], got lengths "
            f"{list(lengths)}. Give this one alone, or leave out buckets.chunk."
        )
    if longest_chunk > max_length:
        raise UserError(
            f"buckets.chunk: expected at most max_length ({max_length}), got {longest_chunk}. "
            f"Give smaller chunks, or raise max_length."
        )
