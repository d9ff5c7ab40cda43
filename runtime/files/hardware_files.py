"""Tables of hardware: those that ship with noria, and the user's own on top of them."""

import tomllib
from importlib import resources
from pathlib import Path

from ...compile import planning
from ...compile.planning.hardware import Hardware, read_hardware
from ..errors import ConfigError
from .run_config import read_toml


def known_hardware(path: Path | None = None) -> dict[str, Hardware]:
    """Hardware by name; a table of the file replaces the published one of its name."""
    text = (resources.files(planning) / "hardware.toml").read_text(encoding="utf-8")
    known = read_hardware(tomllib.loads(text))
    if path is None:
        return known
    tables = read_toml(path)
    try:
        return known | read_hardware(tables)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
