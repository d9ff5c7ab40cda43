"""Reads layout tables by name or by file: the layouts that ship with noria, and the user's own.

A name may have another mesh: `data-tensor@data=4,tensor=2`. Without one, its own mesh is fitted to
the devices. Does not know about models, and reading a table imports no jax.
"""

import os
import shlex
import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import sharding
from ..errors import ConfigError
from .run_config import read_toml

if TYPE_CHECKING:
    from ...sharding.layout import Layout


def named_layout_tables() -> dict[str, dict[str, Any]]:
    """The tables of every layout that ships with noria, by name."""
    folder = resources.files(sharding) / "layouts"
    files = sorted(folder.iterdir(), key=lambda file: file.name)
    return {
        file.name.removesuffix(".toml"): tomllib.loads(file.read_text(encoding="utf-8"))
        for file in files
        if file.name.endswith(".toml")
    }


def layout_file(spelling: str) -> Path | None:
    """The file in a layout spelling, with or without a mesh; None for a named layout."""
    name, _ = _name_and_mesh(spelling)
    return Path(name) if name.endswith(".toml") else None


def _name_and_mesh(spelling: str) -> tuple[str, str | None]:
    # an @ in the path of a file is part of its name
    if "@" not in spelling or spelling.endswith(".toml"):
        return spelling, None
    name, _, mesh = spelling.rpartition("@")
    return name, mesh


def read_layout_table(spelling: str) -> dict[str, Any]:
    """Read the table of a named layout or a TOML file; a mesh after `@` replaces the layout's own.

    Raises:
      ConfigError: The spelling is neither a layout's name nor a readable TOML file.
    """
    file, (name, mesh) = layout_file(spelling), _name_and_mesh(spelling)
    if file is not None:
        table = {"name": name, **read_toml(file)}
    else:
        known = named_layout_tables()
        if name not in known:
            raise ConfigError(
                f"layout: expected a .toml file or one of {', '.join(known)}, got {name!r}."
            )
        table = known[name]
    return table if mesh is None else {**table, "mesh": _mesh(spelling, mesh)}


def has_layout(plan_table: Mapping[str, Any]) -> bool:
    """Whether the table of a plan has a layout."""
    return "mesh" in plan_table


def is_fitted(spelling: str) -> bool:
    """Whether a layout gets a mesh that suits the devices: a named one without a mesh does."""
    return layout_file(spelling) is None and _name_and_mesh(spelling)[1] is None


def read_layout(spelling: str, num_devices: int) -> "Layout":
    """The layout of a spelling for so many devices; see `is_fitted`.

    Raises:
      ConfigError: The spelling is neither a layout's name nor a readable TOML file.
      ValueError: A key or a value of the file is wrong.
    """
    from ...sharding.layout import Layout

    layout = Layout.from_table(read_layout_table(spelling), spelling)
    return layout.fitted(num_devices) if is_fitted(spelling) else layout


def split_spellings(text: str) -> list[str]:
    """Split layout spellings that are separated by spaces.

    A path with spaces is quoted as in a shell; a single file needs no quotes.

    Raises:
      ConfigError: A quote is not closed.
    """
    if os.path.isfile(text):
        return [text]
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"layout: expected names or files, got {text!r} ({error}).") from None


def _mesh(spelling: str, text: str) -> dict[str, int]:
    sizes = {}
    for part in text.split(","):
        axis, equals, size = (piece.strip() for piece in part.partition("="))
        if not (axis and equals and size.isdecimal()) or axis in sizes:
            raise ConfigError(
                f"layout {spelling}: expected a mesh such as data=2,tensor=4 after the @, "
                f"got {text!r}."
            )
        sizes[axis] = int(size)
    return sizes
