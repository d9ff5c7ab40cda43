"""The shares of a device's peaks that programs reach, and the time that they take beside them.

A roofline says how long a part of a call takes at the peaks. An efficiency corrects this for one
kind of device and one version of jax. It names its evidence, as a plan is worth as much as the
figures that it was made from. Without figures all shares are 1. Then the seconds are those of
published peaks, and real runs take longer.

Knows nothing of models, graphs or hardware tables.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ...modelzoo.config_values import check_choice
from ...modelzoo.errors import UserError
from ...sharding.call import KINDS
from ..plan_tables import check_keys, check_number, check_text

PEAKS = "published peaks"
EVIDENCE = ("measured", "compiler's cycles", PEAKS)
PAGES = "pages"
"""The kind of attention that reads the pages of a cache, in the tables by kind of call."""
ASSUMED_SHARE_OF_PAGES = 0.83
"""The share of the roofline that reads of pages are assumed to reach where none was measured: that
of the reads of a cache without pages on an H200. A device whose reads in decode reach less is
assumed to read pages as fast as these."""
_CURVES = {"products", "logits"}
_KINDS_OF_ATTENTION = {*KINDS, PAGES}


@dataclass(frozen=True)
class Shares:
    """The share of the roofline that products reach, by the rows of activations on a device."""

    rows: tuple[int, ...]
    """Rows that were measured, growing."""
    share: tuple[float, ...]

    def __call__(self, rows: float) -> float:
        """The share at a number of rows, interpolated in their logarithm."""
        return float(np.interp(np.log(max(rows, 1)), np.log(self.rows), self.share))


@dataclass(frozen=True)
class Efficiency:
    """The shares of the peaks that programs reach on one kind of device."""

    evidence: str
    """`measured`, `compiler's cycles` or `published peaks`."""
    source: str = ""
    """The measurement, or the reason for an assumption."""
    device: str = ""
    """The device that was measured; empty without a measurement."""
    jax: str = ""
    """The version of jax that was measured; empty without a measurement."""
    date: str = ""
    """The month of the measurement, as `2026-11`; empty without one."""
    call_seconds: float = 0.0
    """Time of every call beside its kernels. Unit: seconds."""
    step_seconds: float = 0.0
    """Time of every decode step beside its kernels. Unit: seconds."""
    layer_seconds: float = 0.0
    """Time of a layer's kernels beside those that move or multiply much. Unit: seconds."""
    products: Mapping[str, Shares] = field(default_factory=dict)
    """Share of products with weights of layers, by dtype of the operands. A dtype without a table
    has the shares of the first one. Unit: shares of the roofline."""
    logits: Mapping[str, Shares] = field(default_factory=dict)
    """Share of the product with the vocabulary, by dtype. Unit: shares of the roofline."""
    attention: Mapping[str, float] = field(default_factory=dict)
    """Share of attention, by kind of call; `pages` is decode with a cache of pages. Unit: shares of
    the roofline."""
    activations: float = 1.0
    """Share of work on the residual stream. Unit: share of the roofline."""
    score_bytes: Mapping[str, float] = field(default_factory=dict)
    """Bytes that a score moves at the peak rate of memory, by kind of call. No key stands for 0: a
    kernel keeps scores on the chip. Unit: bytes."""
    logit_bytes: float = 0.0
    """Bytes that a logit moves at the peak rate of memory while tokens are chosen. Unit: bytes."""

    def __post_init__(self):
        check_choice("evidence of an efficiency", self.evidence, EVIDENCE)
        about = self.device, self.jax, self.date
        if self.evidence == "measured" and not all(about):
            raise UserError(
                f"efficiency: expected the device, the jax version and the date of what was "
                f"measured, got {about}. Write them beside the figures."
            )

    @property
    def has_pages(self) -> bool:
        """Whether the share of reads of pages is known, and not assumed."""
        return PAGES in self.attention

    def share(self, part: str, kind: str, dtype: str, rows: float) -> float:
        """The share of the roofline that a part of a call reaches.

        Args:
          part: The name of the part.
          kind: The kind of call, or `PAGES`.
          dtype: The dtype of the operands of products.
          rows: The rows of activations that products have on a device.
        """
        if part == "attention" and kind == PAGES and not self.has_pages:
            return min(ASSUMED_SHARE_OF_PAGES, self.attention.get("decode", 1.0))
        if part == "attention":
            return self.attention.get(kind, 1.0)
        if part == "activations":
            return self.activations
        curves = {"products": self.products, "experts": self.products, "logits": self.logits}
        by_dtype = curves.get(part, {})
        if not by_dtype:
            return 1.0
        return by_dtype.get(dtype, next(iter(by_dtype.values())))(rows)

    def extra_bytes(self, part: str, kind: str) -> float:
        """Bytes that each score or logit of a part moves in addition."""
        if part == "attention":
            return self.score_bytes.get(kind, 0.0)
        return self.logit_bytes if part == "logits" else 0.0

    def describe(self) -> str:
        """The evidence in words, as `measured h200, jax 0.11.2`."""
        if self.evidence != "measured":
            return self.evidence
        return f"measured {self.device}, jax {self.jax}"

    def to_table(self) -> dict[str, Any]:
        """The table that `from_table` reads: all figures that differ from the default."""
        default = asdict(AT_PEAKS)
        table = {key: value for key, value in asdict(self).items() if value != default[key]}
        for name in _CURVES & set(table):
            table[name] = {
                dtype: {key: list(numbers) for key, numbers in curve.items()}
                for dtype, curve in table[name].items()
            }
        return {"evidence": self.evidence, **table}

    @classmethod
    def from_table(cls, where: str, table: Any) -> "Efficiency":
        """Read a parsed TOML table; ValueError names a wrong key or value."""
        check_keys(where, table, {"evidence"}, set(cls.__dataclass_fields__) - {"evidence"})
        values = dict(table)
        for name in ("evidence", "source", "device", "jax", "date"):
            check_text(f"{where}.{name}", values.get(name, ""))
        for name in ("call_seconds", "step_seconds", "layer_seconds", "logit_bytes"):
            check_number(f"{where}.{name}", values.get(name, 0.0))
        check_number(f"{where}.activations", values.get("activations", 1.0), above=0)
        for name in ("attention", "score_bytes"):
            check_keys(f"{where}.{name}", values.get(name, {}), set(), _KINDS_OF_ATTENTION)
            for kind, number in values.get(name, {}).items():
                above = 0 if name == "attention" else None
                check_number(f"{where}.{name}.{kind}", number, above=above)
        for name in _CURVES & set(table):
            if not isinstance(table[name], Mapping):
                raise UserError(f"{where}.{name}: expected a table by dtype, got {table[name]!r}.")
            values[name] = {
                dtype: _shares(f"{where}.{name}.{dtype}", curve)
                for dtype, curve in table[name].items()
            }
        return cls(**values)


AT_PEAKS = Efficiency(PEAKS)
"""The efficiency of programs that reach the peaks, with calls that cost nothing."""


def _shares(where: str, table: Any) -> Shares:
    check_keys(where, table, {"rows", "share"})
    rows, share = table["rows"], table["share"]
    is_curve = (
        isinstance(rows, list)
        and isinstance(share, list)
        and len(rows) == len(share) > 0
        and all(type(count) is int and count > 0 for count in rows)
        and sorted(set(rows)) == rows
    )
    if not is_curve:
        raise UserError(
            f"{where}: expected growing numbers of rows and as many shares, got {rows!r} and "
            f"{share!r}."
        )
    for number in share:
        check_number(f"{where}.share", number, above=0)
    return Shares(tuple(rows), tuple(map(float, share)))
