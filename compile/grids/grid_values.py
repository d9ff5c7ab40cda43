"""Checks of the values that a user gives for a grid of buckets.

Knows nothing of the use of these values. Guarantees: a wrong value raises a ValueError with its
key, the expected value and the actual one.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any


def check_count(name: str, value: object) -> None:
    """Raise ValueError unless the value is a positive integer."""
    if not is_count(value):
        raise ValueError(f"{name}: expected a positive integer, got {value!r}.")


def chunk_sizes(value: Any) -> tuple[int, ...]:
    """Chunk sizes from a number or a list; ValueError if they are not valid."""
    sizes = tuple(value) if isinstance(value, tuple | list) else (value,)
    check_growing("buckets.chunk", sizes)
    if uneven := [size for less, size in pairwise(sizes) if size % less]:
        raise ValueError(
            f"buckets.chunk: expected each to be a multiple of the one before, so that all lie in "
            f"one segment of the cache, got {list(sizes)}, where {uneven} are none."
        )
    return sizes


def check_list(name: str, values: object) -> Sequence[Any]:
    """The values as given; ValueError unless they are a list."""
    if not isinstance(values, tuple | list):
        raise ValueError(f"{name}: expected a list, got {values!r}.")
    return values


def is_count(value: object) -> bool:
    """Whether the value is a positive integer."""
    # bool is an int in Python; `decode_slots = true` is a mistake
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def check_growing(name: str, values: Sequence[int]) -> None:
    """Raise ValueError unless the values are growing positive integers, and at least one."""
    is_whole = all(is_count(value) for value in values)
    if not values or not is_whole or not all(a < b for a, b in pairwise(values)):
        raise ValueError(f"{name}: expected growing positive integers, got {list(values)}.")
