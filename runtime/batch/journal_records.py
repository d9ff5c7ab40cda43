"""Checks journal records before any of their values is used, and that they are of the same job.

A checksum shows that a record is as it was written, but not that it is valid: another program,
another version or a person may have written it.

Does not know about files or the place of a record. Guarantees: `read_record` returns facts with
every key of their kind and values of the right types, and for a row the output line, or raises
`BadRecord`.
"""

import json
import tomllib
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

from ..errors import OtherConfiguration, UserError
from ..files.differences import differences

FORMAT = 2
SETUP = "processes"
"""The key of the configuration for the set-up of processes that run the job."""
PLAN, MODEL, WEIGHTS, INSTANT = "plan", "model", "weights", "instant"
"""Names of facts: the resolved plan as TOML, the model's name in output lines, the digest of its
weights, and the local time that prompts show, as ISO 8601.
"""
DEVICES = "devices"
"""The name of the fact that other devices continue the job: the configuration that they changed."""
OF_DEVICES = ("target", "layout", "plan", "overrides")
"""The keys of the configuration that other devices may change: what a plan is made for and from."""
OUTPUTS = "outputs"
"""The name of the fact that the outputs are being written.

It is recorded only if there is no plan and no finished row, because no row could run.
"""
Phase = Literal["scan", "load", "build", "run"]
FINISHED_AT = "finished_at"
"""The key in a row's figures for the time of its end, in seconds since the epoch."""
_LARGEST = 1e18
"""A bound above all counts and measurements."""
_HEADER_START = b'{"kind":"header"'


class BadRecord(UserError):
    """An invalid record; its message follows a text that gives the record's place."""


def read_record(payload: bytes) -> tuple[dict[str, Any], bytes]:
    """The facts of a record and its output line, which is empty for other kinds than a row.

    Raises:
        BadRecord: A key is missing, or a value has a wrong type or format.
    """
    content, tab, line = payload.partition(b"\t")
    facts = _table("facts", content)
    kind = facts.get("kind")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise BadRecord(f"kind: expected one of {', '.join(_FIELDS)}, got {_shown(kind)}")
    if kind == "header" and facts.get("format") != FORMAT:
        raise BadRecord(
            f"expected a journal of format {FORMAT}, got {_shown(facts.get('format'))}, which the "
            "version of noria that wrote it can finish"
        )
    for key, (expected, is_right) in _FIELDS[kind].items():
        if key not in facts:
            raise BadRecord(f"{key}: expected {expected} in a {kind}, got none")
        if not is_right(facts[key]):
            raise BadRecord(f"{key}: expected {expected} in a {kind}, got {_shown(facts[key])}")
    if kind == "row":
        _table("output line", line)
    elif tab:
        raise BadRecord(f"expected no output line in a {kind}, got one")
    if kind == "fact" and facts["name"] in _READERS:
        expected, read = _READERS[facts["name"]]
        try:
            read(facts["value"])
        except ValueError:
            name, shown = facts["name"], _shown(facts["value"])
            raise BadRecord(f"the {name}: expected {expected}, got {shown}") from None
    return facts, line


def is_foreign(start: bytes) -> bool:
    """Whether a file without a header is not the beginning of a journal, by its first bytes."""
    # an interrupted first write has the beginning of a header, after its checksum
    return b"\n" in start or (len(start) > 9 and not _HEADER_START.startswith(start[9:25]))


def _table(name: str, content: bytes) -> dict[str, Any]:
    try:
        table = json.loads(content)
    except (ValueError, RecursionError):
        raise BadRecord(f"{name}: expected a JSON object, got {_shown(content)}") from None
    if not isinstance(table, dict):
        raise BadRecord(f"{name}: expected a JSON object, got {_shown(table)}")
    return table


def _shown(value: object) -> str:
    text = "none" if value is None else repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return -_LARGEST < value < _LARGEST  # false for NaN


def _is_run(value: object) -> bool:
    """Whether a value has the fields of a `JobRun`, each of the right type."""
    if not isinstance(value, dict) or value.keys() != _RUN.keys():
        return False
    return all(is_right(value[key]) for key, is_right in _RUN.items())


_RUN: Mapping[str, Callable[[Any], bool]] = {
    "started": _is_number,
    "until": _is_number,
    "host": _is_text,
    "processes": _is_text,
    "price_per_hour": lambda value: value is None or _is_number(value),
    "seconds": lambda value: (
        isinstance(value, dict)
        and value.keys() == set(get_args(Phase))
        and all(map(_is_number, value.values()))
    ),
    "phase": lambda value: value in get_args(Phase),
    "rows": _is_count,
    "output_tokens": _is_count,
    "end": _is_text,
}
_READERS: Mapping[str, tuple[str, Callable[[str], object]]] = {
    PLAN: ("TOML", tomllib.loads),
    DEVICES: ("a JSON object", lambda text: _table(DEVICES, text.encode())),
    INSTANT: ("a time", datetime.fromisoformat),
}
"""The forms of the values of facts, and their readers."""
_TEXT = ("a string", _is_text)
_FIELDS: Mapping[str, Mapping[str, tuple[str, Callable[[Any], bool]]]] = {
    "header": {
        "configuration": (
            "a table of strings",
            lambda value: isinstance(value, dict) and all(map(_is_text, value.values())),
        ),
    },
    "fact": {"name": _TEXT, "value": _TEXT},
    "setup": {"setup": _TEXT},
    "run": {"number": ("a number from 0", _is_count), "run": ("the figures of a run", _is_run)},
    "row": {
        "row": ("a number from 0", _is_count),
        "custom_id": _TEXT,
        "request": _TEXT,
        "code": ("a string or null", lambda value: value is None or _is_text(value)),
        "metrics": (
            "a table of finite numbers",
            lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
        ),
    },
}


def check_same_configuration(
    path: Path, stored: Mapping[str, str], wanted: Mapping[str, str], *, keeps_plan: bool
) -> None:
    """Check that a journal has the configuration of this job.

    `keeps_plan` says that the job cannot continue on other devices.

    Raises:
        OtherConfiguration: They differ; the error has one line for each difference.
    """
    lines = differences(stored, wanted, ("there", "now"))
    if lines:
        raise OtherConfiguration(
            f"{path}: expected the configuration of this job, got another one:\n"
            + "\n".join(lines)
            + "\nRun with the settings it was begun with, choose another output, or discard it "
            f"with --restart.{_devices_remedy(stored, wanted, keeps_plan)}",
            stored,
        )


def _devices_remedy(stored: Mapping[str, str], wanted: Mapping[str, str], keeps_plan: bool) -> str:
    """The remedy if nothing but the processes and the devices differ."""
    differing = {key for key in {*stored, *wanted} if stored.get(key) != wanted.get(key)}
    if not differing & {SETUP, "target"} or differing - {SETUP, *OF_DEVICES}:
        return ""
    if differing == {SETUP}:
        return (
            " Other processes add numbers in another order; with --allow-different-numerics the "
            "job continues anyway, and the manifest names both set-ups."
        )
    if keeps_plan or "pipeline" in wanted:
        return ""
    given = " The --plan must be for these devices." if wanted.get("plan") != "derived" else ""
    return (
        " With --allow-different-numerics the job continues on these devices by another plan: "
        f"finished rows are kept, and the manifest names both set-ups.{given}"
    )
