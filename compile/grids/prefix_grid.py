"""The prefixes whose pages a decode step reads once for several rows: the table `[prefixes]`.

Every prompt begins with the longest listed prefix that it has, or with an empty one. So the way in
which a row reads its entries depends on its own tokens and the plan alone.

Knows nothing of models, devices or files.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from re import fullmatch
from typing import Any, NamedTuple

from ...modelzoo.config_values import check_count, is_count
from ...modelzoo.errors import UserError
from ..plan_tables import PlanTable
from .grid_values import check_list

HASH_BYTES = 8
_HASH = f"[0-9a-f]{{{2 * HASH_BYTES}}}"
_UINT32 = "I"


class PlannedPrefix(NamedTuple):
    """One prefix of a plan."""

    length: int
    """The number of tokens. Unit: tokens."""
    hash: str
    """The hash of the tokens: that of `begin_hash`, continued with them as 32-bit integers."""


def begin_hash(adapter: str | None) -> "blake2b":
    """The BLAKE2b hash of no tokens, for rows with an adapter of this name or with none.

    Keys and values of rows with other adapters differ, and so do the hashes of their tokens.
    """
    named = b"" if adapter is None else b"adapter %s\0" % adapter.encode()
    return blake2b(named, digest_size=HASH_BYTES)


@dataclass(frozen=True)
class PrefixGrid(PlanTable, name="prefixes"):
    """Prefixes, and the shape of the groups of rows that read them."""

    groups: int
    """The number of groups of a decode step. The rows of a group begin with the same prefix, whose
    whole pages are read once for all of them. Unit: groups."""
    rows: int
    """The maximum number of rows of a group. Rows without a prefix are in no group. Unit: rows."""
    length: int
    """The largest number of positions that a group reads, a multiple of `buckets.page`. Each row
    reads what is left of a longer prefix itself. Unit: tokens."""
    shared: tuple[PlannedPrefix, ...]
    """The prefixes: the length and the hash of each one. Unit: tokens."""

    def __post_init__(self):
        """Check the fields; ValueError names the wrong key."""
        for name in ("groups", "rows", "length"):
            check_count(f"prefixes.{name}", getattr(self, name))
        entries = check_list("prefixes.shared", self.shared)
        object.__setattr__(self, "shared", tuple(map(_checked, entries)))
        if not self.shared or len(set(self.shared)) < len(self.shared):
            raise UserError(
                f"prefixes.shared: expected at least one prefix and each one once, got "
                f"{len(self.shared)}. List each prefix once, or leave out the table."
            )

    def check_beside(self, chunks: Sequence[int], page: int | None, slot_groups: int) -> None:
        """Raise ValueError unless groups can read the prefixes in a grid of these sizes."""
        if not chunks:
            raise UserError(
                "plan [prefixes]: expected prompts in chunks beside them, as groups of rows read "
                "pages that one graph has computed, got no buckets.chunk. Give it, or leave "
                "[prefixes] out."
            )
        assert page is not None
        if self.length % page:
            raise UserError(
                f"prefixes.length: expected a multiple of buckets.page ({page}), as groups of "
                f"rows read whole pages, got {self.length}. Change either."
            )
        if self.groups % slot_groups:
            raise UserError(
                f"prefixes.groups: expected a multiple of buckets.slot_groups ({slot_groups}), so "
                f"that the rows of a group have pages on the same devices, got {self.groups}. "
                f"Change either."
            )

    def to_table(self) -> dict[str, Any]:
        """The table of a plan's file."""
        return {
            "groups": self.groups,
            "rows": self.rows,
            "length": self.length,
            "shared": [list(prefix) for prefix in self.shared],
        }

    def prefix_of(
        self, token_ids: Sequence[int], adapter: str | None = None
    ) -> PlannedPrefix | None:
        """The longest listed prefix that a prompt begins with and is longer than.

        `adapter` is the name of the row's adapter.
        """
        found, state, start = None, begin_hash(adapter), 0
        for length in self._lengths:
            if length >= len(token_ids):
                break
            state.update(array(_UINT32, token_ids[start:length]).tobytes())
            start = length
            if (prefix := PlannedPrefix(length, state.copy().hexdigest())) in self._known:
                found = prefix
        return found

    @cached_property
    def _known(self) -> frozenset[PlannedPrefix]:
        return frozenset(self.shared)

    @cached_property
    def _lengths(self) -> list[int]:
        return sorted({prefix.length for prefix in self.shared})


def _checked(entry: object) -> PlannedPrefix:
    if isinstance(entry, tuple | list) and len(entry) == 2:
        length, digest = entry
        if is_count(length) and isinstance(digest, str) and fullmatch(_HASH, digest):
            return PlannedPrefix(length, digest)
    raise UserError(
        f"prefixes.shared: expected pairs of a length and a hash of {2 * HASH_BYTES} hexadecimal "
        f"digits in lower case, got {entry!r}."
    )
