"""Folders that a command is about to fill: what cannot be is refused before the work is done."""

import os
from pathlib import Path

from .run_config import ConfigError


def check_fillable(folder: Path) -> None:
    """Refuse a folder that is none, or that could neither be made nor written to."""
    there = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    if not there.is_dir():
        raise ConfigError(
            f"{folder}: expected a folder, got the file {there}. Choose another name."
        )
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{folder}: expected a folder to write to, got {there}, where this user may not write. "
            f"Choose another."
        )
