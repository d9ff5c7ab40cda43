"""The two folders in which compiled programs are kept between processes.

One folder has the graphs of plans (see `executable_cache.py`). The other is jax's persistent
compilation cache, for small programs such as those that change the layout of weights. A program
runs with the rights of the user who loads it. So the folders and their parent, in which they could
be replaced, must belong to that user and be writable by nobody else; then entries need no check of
their author. Guarantees: a job whose cache cannot be used or trusted says so in one line, and
compiles.
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .. import errors
from ..errors import BundleUnusable, CacheUnusable
from ..files.file_checks import default_directory
from ..files.own_files import open_own_folder

_OWN = 0o700
MAX_BYTES = 4 * 2**30
"""Maximum size of the folder of graphs; above it, the least recently used graphs are removed."""


def check_trusted(directory: Path) -> None:
    """Check that only the user can have written the programs in a folder; it may be absent.

    Raises:
      CacheUnusable: Another user owns the folder or its parent, or can write to one of them.
    """
    try:
        with open_own_folder(directory.parent) as parent, open_own_folder(directory.name, parent):
            pass
    except FileNotFoundError:
        pass
    except BundleUnusable as error:
        raise CacheUnusable(f"{directory}: {error}") from None
    except OSError as error:
        raise CacheUnusable(
            f"{directory}: expected a folder, not a link, inside a folder ({error.strerror}); "
            f"move it away"
        ) from None


def enable(on_note: Callable[[str], None], directory: Path | None = None) -> Path | None:
    """Keep every program that jax compiles from now on, also programs that compile fast.

    Args:
      on_note: Called with a line that gives the reason, if nothing is kept.
      directory: The folder of jax's cache; by default `default_directory`.

    Returns:
      The folder for graphs of plans, beside `directory`; None if nothing is kept.
    """
    import jax

    try:
        directory = directory or default_directory()
        graphs = directory.with_name("graphs")
        make_folder(directory)
        make_folder(graphs)
    except CacheUnusable as error:
        on_note(f"no compile cache, so every run compiles all graphs: {error}.")
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return graphs


def make_folder(directory: Path) -> None:
    """Create a folder, and check that it is trusted and can be written to.

    Raises:
      CacheUnusable: It is not, or it cannot be created.
    """
    remedy = "set XDG_CACHE_HOME to a folder that can be written to"
    try:
        directory.parent.parent.mkdir(parents=True, exist_ok=True)
        for folder in (directory.parent, directory):
            folder.mkdir(exist_ok=True, mode=_OWN)
    except OSError as error:
        raise CacheUnusable(f"{errors.message(error)}; {remedy}") from None
    check_trusted(directory)
    try:
        directory.chmod(_OWN)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CacheUnusable(f"{directory}: {error.strerror}; {remedy}") from None


def remove_oldest(folder: Path, max_bytes: int = MAX_BYTES) -> None:
    """Remove the least recently used files of a folder until the others fit into `max_bytes`."""
    with suppress(OSError):
        files = [(entry.stat(), entry.path) for entry in os.scandir(folder) if entry.is_file()]
        files.sort(key=lambda item: item[0].st_mtime, reverse=True)
        total_bytes = 0
        for status, path in files:
            total_bytes += status.st_size
            if total_bytes > max_bytes:
                Path(path).unlink(missing_ok=True)
