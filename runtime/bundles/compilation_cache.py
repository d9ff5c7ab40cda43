"""The folders of compiled programs kept between processes.

Graphs of plans are kept in one (see `bundles/kept_programs.py`). The other is jax's persistent
compilation cache, for small programs such as those that lay weights out. A program runs with the
rights of the user who loads it, so the folders must belong to that user and be closed to all
others. So must their parent, where somebody could replace them. Entries need no check of who wrote
them, as nobody else can write into a closed folder. Guarantees: a job whose cache cannot be used or
trusted says so in one line, and compiles.
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from .. import errors
from ..errors import BundleUnusable, CacheUnusable
from ..files.own_files import opened

_OWN = 0o700
MAX_BYTES = 4 * 2**30
"""Size of the folder of graphs above which those that were used longest ago are removed."""


def default_directory() -> Path:
    """The user's cache directory for noria's compiled programs."""
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # no HOME, and the user is in no list
        raise CacheUnusable("there is no home folder; set XDG_CACHE_HOME to a folder") from None
    return root / "noria" / "xla"


def check_trusted(directory: Path) -> None:
    """Raise CacheUnusable if somebody else may have written a program that would be run."""
    try:
        with opened(directory.parent) as parent, opened(directory.name, parent) as descriptor:
            os.fchmod(descriptor, _OWN)
    except BundleUnusable as error:
        raise CacheUnusable(f"{directory}: {error}") from None
    except OSError as error:
        raise CacheUnusable(
            f"{directory}: expected a folder, no link to one, in a folder ({error.strerror}); "
            f"move it away"
        ) from None


def enable(on_note: Callable[[str], None], directory: Path | None = None) -> Path | None:
    """Keep every program that jax compiles from here on, however quick its compile was.

    Args:
      on_note: Called with one line that gives the reason, if nothing is kept.
      directory: The folder of jax's cache; by default the user's.

    Returns:
      The folder beside it, where `LLM` and jobs keep graphs of plans; None if nothing is kept.
    """
    import jax

    try:
        directory = directory or default_directory()
        graphs = directory.with_name("graphs")
        _make(directory)
        _make(graphs)
    except CacheUnusable as error:
        on_note(f"no compile cache, so every run compiles anew: {error}.")
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return graphs


def _make(directory: Path) -> None:
    """Make the folder, and check that it is trusted and can be written."""
    remedy = "set XDG_CACHE_HOME to a folder that can be written"
    try:
        directory.parent.parent.mkdir(parents=True, exist_ok=True)
        for folder in (directory.parent, directory):
            folder.mkdir(exist_ok=True, mode=_OWN)
    except OSError as error:
        raise CacheUnusable(f"{errors.message(error)}; {remedy}") from None
    check_trusted(directory)
    try:
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CacheUnusable(f"{directory}: {error.strerror}; {remedy}") from None


def remove_oldest(folder: Path, max_bytes: int = MAX_BYTES) -> None:
    """Keep the files that were used last, as many as fit into `max_bytes`."""
    with suppress(OSError):
        files = [(entry.stat(), entry.path) for entry in os.scandir(folder) if entry.is_file()]
        files.sort(key=lambda item: item[0].st_mtime, reverse=True)
        total = 0
        for facts, path in files:
            total += facts.st_size
            if total > max_bytes:
                Path(path).unlink(missing_ok=True)
