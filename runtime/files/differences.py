"""Names the differences of two tables of facts, key by key.

Facts are texts. A text that is a JSON object, such as a plan, is compared by its keys, so that an
error names the key that differs and not two long texts. Does not know what the facts mean.
"""

import json
from collections.abc import Mapping


def differences(
    first: Mapping[str, object], second: Mapping[str, object], names: tuple[str, str]
) -> list[str]:
    """One line for each key whose values differ, with both values after the two `names`.

    >>> differences({"plan": '{"a": {"b": 1}}'}, {"plan": '{"a": {"b": 2}}'}, ("there", "now"))
    ['  plan a.b: there 1, now 2']
    """
    return [
        f"  {key}: {names[0]} {_shown(ours)}, {names[1]} {_shown(theirs)}"
        for name in sorted({*first, *second})
        if first.get(name) != second.get(name)
        for key, ours, theirs in _differing(name, first.get(name), second.get(name))
    ]


def flat(name: str, value: object) -> dict[str, object]:
    """A nested table as one level of dotted keys; tables in a list have their index as key."""
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {name: value}
    return {
        key: leaf
        for inner, content in value.items()
        for key, leaf in flat(f"{name}.{inner}" if name else str(inner), content).items()
    }


def _differing(name: str, first: object, second: object) -> list[tuple[str, object, object]]:
    """The keys with both values; tables are compared key by key."""
    tables = _table(first), _table(second)
    if tables[0] is None or tables[1] is None:
        # a whole table says less than that there is one
        ours, theirs = (
            value if table is None else "given"
            for value, table in zip((first, second), tables, strict=True)
        )
        return [(name, ours, theirs)]
    ours, theirs = flat("", tables[0]), flat("", tables[1])
    keys = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
    found = [(f"{name} {key}", ours.get(key), theirs.get(key)) for key in keys]
    # without another difference, the tables have their keys in another order
    return found or [(f"{name}, order of keys", ", ".join(ours), ", ".join(theirs))]


def _table(value: object) -> Mapping[str, object] | None:
    """The table that a text is; None for any other value."""
    if not isinstance(value, str) or not value.startswith("{"):
        return None
    try:
        table = json.loads(value)
    except ValueError:
        return None
    return table if isinstance(table, dict) else None


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    return "none" if value == "" else f"{value!s:.500}"
