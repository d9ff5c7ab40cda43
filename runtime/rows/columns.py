"""Decides which columns of a table a job reads, and makes requests of the cells of its rows.

The columns become the contents of a request to one endpoint, or, in a job of several stages, the
variables of templates. Other columns may be carried to the output. Does not know about files.
Guarantees: a row gives one request, whatever its cells hold.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from ..errors import InputError, RowError
from ..files.strict_json import dump_line, parse_object
from .lines import CHAT_URL, COMPLETION_URL
from .pooled_body import PAIR_KEYS, POOLED_URLS

_IDS = ("custom_id", "id")
INPUT = ("input",)
"""The column of texts whose vectors are asked for."""
_CONTENTS: Mapping[str, tuple[str, ...]] = {
    COMPLETION_URL: ("prompt",),
    CHAT_URL: ("messages",),
    **{url: PAIR_KEYS.get(task, INPUT) for url, task in POOLED_URLS.items()},
}
"""The keys of the contents of requests to each endpoint; columns may have these names."""


@dataclass(frozen=True)
class RequestColumns:
    """The columns of one table that a job reads."""

    url: str
    """The endpoint; empty if the columns are variables of templates."""
    contents: Mapping[str, str]
    """The column of each key of a request's body, or of each variable of templates."""
    id: str | None
    """The column of ids; None if rows are numbered."""
    carried: Mapping[str, str]
    """The column of each name in the output."""

    @property
    def names(self) -> list[str]:
        """The columns that are read, each once."""
        others = () if self.id is None else (self.id,)
        return list(dict.fromkeys(chain(self.contents.values(), others, self.carried.values())))

    def line(self, row: int, cells: Mapping[str, Any]) -> bytes:
        """The request of a row, as a line of a batch file.

        Args:
            row: The number of the row, from 0.
            cells: The cells of the row by column.
        """
        url, body = self.url, {key: cells[name] for key, name in self.contents.items()}
        prompt = body.get("prompt") if url == COMPLETION_URL else None
        if isinstance(prompt, list) and any(isinstance(item, dict) for item in prompt):
            url, body = CHAT_URL, {"messages": prompt}
        if url == CHAT_URL:
            # a cell has a list of messages, its JSON, or the text of a user
            if not isinstance(cell := body["messages"], str):
                # in a column of structs, keys that a message lacks are null
                body = {"messages": _without_null_keys(cell)}
            elif self.contents.get("messages") == "messages":
                body = {"messages": _parsed(cell)}
            else:
                body = {"messages": [{"role": "user", "content": cell}]}
        custom_id = None if self.id is None else cells[self.id]
        if custom_id is None:
            custom_id = f"row-{row}"
        elif isinstance(custom_id, int) and not isinstance(custom_id, bool):
            custom_id = str(custom_id)
        record = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
        return dump_line(record) + b"\n"


@dataclass(frozen=True)
class Columns:
    """The columns that the options of a job name.

    Attributes:
        contents: The columns of prompts, or of other contents of requests; empty for the usual
            names.
        id: The column of ids; None for the usual names, if the table has them.
        url: The endpoint of requests; None to derive it from the columns.
        carried: The column of each name in the output.
        are_variables: Whether all columns are variables of templates.
        generates: Whether the model generates tokens. If it does, only `url` makes inputs for
            vectors of a column.
    """

    contents: tuple[str, ...] = ()
    id: str | None = None
    url: str | None = None
    carried: Mapping[str, str] = field(default_factory=dict)
    are_variables: bool = False
    generates: bool = True

    def find(self, path: Path, present: Sequence[str]) -> RequestColumns:
        """The columns of a table with some names.

        Raises:
            InputError: A column is missing, or several have its name.
        """
        name = self.id or next((name for name in _IDS if name in present), None)
        if name is not None:
            _check(path, "--id-column", name, present)
        for column in self.carried.values():
            _check(path, "--carry", column, present)
        if self.are_variables:
            if twice := [column for column in present if present.count(column) > 1]:
                raise InputError(
                    f"{path}: expected columns with names of their own, as templates read them by "
                    f"name, got {twice[0]!r} {present.count(twice[0])} times. Rename one of them."
                )
            return RequestColumns("", {key: key for key in present}, name, self.carried)
        url = self._url(present)
        contents = dict(zip(_CONTENTS[url], self._contents(path, url, present), strict=True))
        return RequestColumns(url, contents, name, self.carried)

    def _url(self, present: Sequence[str]) -> str:
        """The endpoint: the given one, or the first whose contents the columns are."""
        if self.url is not None:
            return self.url
        for url, keys in _CONTENTS.items():
            if keys == INPUT and self.generates:
                continue
            if self.contents == keys or (not self.contents and set(keys) <= set(present)):
                return url
        return COMPLETION_URL

    def _contents(self, path: Path, url: str, present: Sequence[str]) -> tuple[str, ...]:
        keys = _CONTENTS[url]
        names = self.contents or keys
        if len(names) != len(keys):
            raise InputError(
                f"{path}: expected --prompt-column {len(keys)} times for {url}, for "
                f"{' and '.join(keys)}, got {', '.join(names)}."
            )
        if not self.contents and (missing := [key for key in keys if key not in present]):
            raise InputError(
                f"{path}: expected a column {missing[0]!r}, got {', '.join(present) or 'none'}. "
                "Name the column of the prompts with --prompt-column, and say with --url what its "
                "cells are. Separate cells by commas in CSV and by tabs in TSV."
            )
        for name in names:
            _check(path, "--prompt-column", name, present)
        return names


def _check(path: Path, option: str, name: str, present: Sequence[str]) -> None:
    if (count := present.count(name)) != 1:
        raise InputError(
            f"{path}: expected one column {name!r}, got {count} of it among {', '.join(present)}. "
            f"Name another one with {option}."
        )


def _without_null_keys(value: object) -> object:
    if isinstance(value, list):
        return list(map(_without_null_keys, value))
    if isinstance(value, dict):
        return {k: _without_null_keys(item) for k, item in value.items() if item is not None}
    return value


def _parsed(messages: str) -> object:
    """The messages in a text; a text that is no JSON is returned, and its row becomes an error."""
    with suppress(RowError):
        record = parse_object(f'{{"messages":{messages}}}'.encode())
        if len(record) == 1:
            return record["messages"]
    return messages
