"""Derives the type of a column of a Parquet table from its values, which are values of JSON.

Does not know what the values mean. Guarantees: every value has a form in the type of its column.
"""

import json
from typing import Any

_INT64 = range(-(2**63), 2**63)
_SCALARS = ("bool_", "int64", "float64", "string")


class ColumnType:
    """The type of the values that a column has; `add` all of them before using it.

    Whole numbers are `int64`, numbers `double`, truth values `bool`, and lists have the type of
    their items. A column of objects or of several kinds of values has texts: JSON for all values
    that are no texts themselves. A column without values has texts, too.
    """

    def __init__(self):
        self._kinds: set[str] = set()
        self._items: ColumnType | None = None

    def add(self, value: Any) -> None:
        """Note a value of the column."""
        if value is None:
            return
        if isinstance(value, list):
            self._items = self._items or ColumnType()
            for item in value:
                self._items.add(item)
        self._kinds.add(_kind(value))

    def in_arrow(self, arrow: Any) -> Any:
        """The type in the package `arrow`."""
        if self._kinds == {"list"} and self._items is not None:
            return arrow.list_(self._items.in_arrow(arrow))
        return getattr(arrow, self._scalar())()

    def form(self, value: Any) -> Any:
        """The form of a value of the column in its type."""
        if value is None:
            return None
        if self._kinds == {"list"} and self._items is not None:
            return list(map(self._items.form, value))
        if self._scalar() == "float64":
            return float(value)
        if self._scalar() != "string":
            return value
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        # JSON may escape half of a pair of surrogates, which no encoding has
        return text.encode("utf-8", "replace").decode()

    def _scalar(self) -> str:
        if self._kinds == {"int64", "float64"}:
            return "float64"
        kind = next(iter(self._kinds)) if len(self._kinds) == 1 else "string"
        return kind if kind in _SCALARS else "string"


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "bool_"
    if isinstance(value, int):
        return "int64" if value in _INT64 else "object"
    if isinstance(value, float):
        return "float64"
    return {str: "string", list: "list"}.get(type(value), "object")
