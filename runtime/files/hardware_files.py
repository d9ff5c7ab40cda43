"""The hardware tables: the published ones that ship with noria, and the user's own."""

import tomllib
from importlib import resources
from pathlib import Path

from ...compile import hardware
from ...compile.hardware.hardware import Hardware, hardware_of, read_hardware
from ...compile.target_names import TargetName
from ..errors import ConfigError
from .run_config import read_toml


def known_hardware(path: Path | None = None) -> dict[str, Hardware]:
    """All hardware by name.

    Args:
      path: A TOML file of the user; a table in it replaces the published table of the same name.

    Raises:
      ConfigError: The file cannot be read, or a table in it is invalid.
    """
    text = (resources.files(hardware) / "hardware.toml").read_text(encoding="utf-8")
    known = read_hardware(tomllib.loads(text))
    if path is None:
        return known
    tables = read_toml(path)
    try:
        return known | read_hardware(tables)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def price_per_hour(target: str, path: Path) -> float:
    """The price of all devices of a target, by the user's hardware tables.

    Raises:
      ConfigError: The table of the target's hardware has no price.
    """
    hardware = hardware_of(target, known_hardware(path))
    if hardware.price_per_hour is None:
        raise ConfigError(
            f"--prices {path}: expected a table [{hardware.name}] with price_per_hour, as the "
            f"job runs on {target}, got none. Add the key."
        )
    # the devices of a CPU target are parts of one machine
    name = TargetName.parse(target)
    return hardware.price_per_hour * (1 if name.platform == "cpu" else name.num_devices)
