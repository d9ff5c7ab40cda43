"""The numbers of a plan: in which dtype a model computes. Knows nothing of arrays."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .plan_tables import check_keys

DTYPES = ("float32", "bfloat16")
_RESERVED = {"weights", "group", "activations", "cache"}


@dataclass(frozen=True)
class Numbers:
    """The table `[numbers]` of a plan."""

    dtype: str
    """Of weights and activations."""

    def __post_init__(self):
        if self.dtype not in DTYPES:
            raise ValueError(f"numbers.dtype: expected {' or '.join(DTYPES)}, got {self.dtype!r}.")

    @classmethod
    def from_table(cls, table: Mapping[str, Any]) -> "Numbers":
        """Read the parsed table; ValueError names a key that is wrong, missing or reserved."""
        check_keys("[numbers]", table, {"dtype"}, reserved=_RESERVED)
        return cls(**table)
