"""The user's cache of executables, one file for each graph.

The name of a file is a hash of everything that its executable depends on: versions, sources, flags,
processor, devices, model, and the parts of the plan that decide the graph. Plans that differ only
in prefill buckets share all other graphs. Nobody else can write into the folder, so its files are
trusted. Each file begins with the hash of its content, because a disk may damage it.

Guarantees: a file under its final name is complete; if a file cannot be written or read, the graph
is compiled, and a note says why.
"""

import hashlib
import json
import os
import tempfile
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import jax

from ...compile.compiled_graphs import graph_names
from ...compile.plan import Plan
from ...compile.targets import Target
from ...modelzoo.config import DecoderConfig
from .compilation_cache import remove_oldest
from .key import digest, surroundings
from .loading import dump


class ExecutableCache:
    """The executables of one plan in the user's cache.

    Args:
      folder: A folder into which nobody else can write; it is created if it is absent.
      plan: The plan of the graphs.
      target: The devices of the executables.
      config: The model's configuration.
      on_note: Called with a line for each file that cannot be read or written.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        target: Target,
        config: DecoderConfig,
        on_note: Callable[[str], None],
    ):
        self._folder, self._on_note = folder, on_note
        with suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            remove_oldest(folder)
        self._paths = {
            name: folder / f"{key}.bin" for name, key in graph_keys(plan, target, config).items()
        }

    def read(self) -> dict[str, bytes]:
        """Read the bytes of every executable in the cache, by the name of its graph."""
        serialized = {}
        for name, path in self._paths.items():
            try:
                content = path.read_bytes()
                os.utime(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._on_note(f"compile cache, {name}: {path}: {error.strerror}")
                continue
            data = content[_HASH_BYTES:]
            if hashlib.sha256(data).digest() == content[:_HASH_BYTES]:
                serialized[name] = data
            else:
                self._on_note(f"compile cache, {name}: {path} is damaged; compiling it again")
        return serialized

    def keep(self, name: str, executable: jax.stages.Compiled) -> None:
        """Write the executable of a graph; it must have been compiled in this process."""
        try:
            _write(self._paths[name], dump(executable))
        except Exception as error:  # the graph is compiled, so the job can run anyway
            self._on_note(f"compile cache, {name}: not kept ({error})")


def _write(path: Path, data: bytes) -> None:
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(data).digest())
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        # a full disk needs the space
        with suppress(OSError):
            os.unlink(temporary)
        raise


_HASH_BYTES = hashlib.sha256().digest_size


def graph_keys(plan: Plan, target: Target, config: DecoderConfig) -> dict[str, str]:
    """For each graph of a plan, a hash of everything that its executable depends on."""
    table = tomllib.loads(replace(plan, evidence=None).to_toml())
    table["model"] = {"scan_layers": plan.model.scan_layers}
    table.pop("max_length_reason", None)
    # the name of a prefill graph contains its own bucket; other buckets do not affect it
    del table["buckets"]["prefill"]
    common = json.dumps([surroundings(target, config), table], sort_keys=True)
    return {name: digest(f"{common}\n{name}") for name in graph_names(plan.buckets)}
