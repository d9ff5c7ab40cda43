"""Where compiled programs are kept between processes: jax's persistent compilation cache.

Knows nothing of graphs. A cached program is found by its content, compiler version and flags, so a
stale entry is never used; the directory belongs to the user and is trusted like the installed
packages.
"""

import os
from pathlib import Path


def default_directory() -> Path:
    """The user's cache directory for noria's compiled programs."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "noria" / "xla"


def enable(directory: Path | None = None) -> Path:
    """Keep every compiled program from here on, however quick its compile was."""
    import jax

    directory = directory or default_directory()
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return directory
