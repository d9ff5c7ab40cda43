"""Finds and checks the folders that noria writes to.

Does not know what they are for.
"""

import os
from pathlib import Path

from ..errors import CacheUnusable, ConfigError


def default_directory() -> Path:
    """The user's cache directory for jax's compiled programs.

    Raises:
      CacheUnusable: The user has no home folder and XDG_CACHE_HOME is not set.
    """
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME, and no entry of the user in the password database
        raise CacheUnusable("there is no home folder; set XDG_CACHE_HOME to a folder") from None
    return root / "noria" / "xla"


def check_fillable(folder: Path) -> None:
    """Check that a folder exists or can be created, and can be written to.

    Raises:
        ConfigError: The path is a file, or the user may not write to it.
    """
    existing = next(path for path in (folder, *folder.resolve().parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(
            f"{folder}: expected a folder, got the file {existing}. Choose another name."
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{folder}: expected a folder to write to, got {existing}, where this user may not "
            f"write. Choose another folder."
        )


def check_new_folder(folder: Path, model: Path) -> None:
    """Check that a folder is new or empty, and outside a model's directory.

    Raises:
        ConfigError: The folder has files, is in the model's directory, or cannot be created.
    """
    if model.is_dir() and folder.resolve().is_relative_to(model.resolve()):
        raise ConfigError(
            f"{folder}: expected a folder outside the model's directory, which is only read. "
            f"Choose another folder."
        )
    check_fillable(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder}: expected a new or empty folder, got one with files, and no file is "
            f"overwritten. Choose another folder, or remove this one if an earlier command did "
            f"not finish it."
        )
