"""The user's cache of executables, one file for each graph.

The name of a file is a hash of everything that its executable depends on: versions, sources, flags,
processor, devices, model, and the keys of the plan that the graph's program reads. Plans that
differ in other keys share the executable. Nobody else can write into the folder, so its files are
trusted. Each file begins with the hash of its content, because a disk may damage it.

Guarantees: a file under its final name is complete; if a file cannot be written or read, the graph
is compiled, and a note says why.
"""

import hashlib
import json
import os
import pickle
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from ...compile.graphs.graph_kinds import GraphKey, graph_keys, read_values
from ...compile.plan import Plan
from ...compile.targets import Target
from ...modelzoo.config import DecoderConfig
from ..errors import UserError
from ..plans.plan_facts import plan_table
from .compilation_cache import remove_oldest
from .key import digest, surroundings


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
            key: folder / f"{name}.bin" for key, name in digests(plan, target, config).items()
        }

    def read(self) -> dict[GraphKey, bytes]:
        """Read the bytes of every executable in the cache."""
        serialized = {}
        for key, path in self._paths.items():
            try:
                content = path.read_bytes()
                os.utime(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                self._on_note(f"compile cache, {key}: {path}: {error.strerror}")
                continue
            data = content[_HASH_BYTES:]
            if hashlib.sha256(data).digest() == content[:_HASH_BYTES]:
                serialized[key] = data
            else:
                self._on_note(f"compile cache, {key}: {path} is damaged; compiling it again")
        return serialized

    def keep(self, key: GraphKey, executable: jax.stages.Compiled) -> None:
        """Write the executable of a graph; it must have been compiled in this process."""
        try:
            _write(self._paths[key], dump(executable))
        except Exception as error:  # the graph is compiled, so the job can run anyway
            self._on_note(f"compile cache, {key}: not kept ({error})")


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


def digests(plan: Plan, target: Target, config: DecoderConfig) -> dict[GraphKey, str]:
    """For each graph of a plan, a hash of everything that its executable depends on."""
    common, table = json.dumps(surroundings(target, config)), plan_table(plan)
    return {key: digest(f"{common}\n{read_values(table, key)}") for key in graph_keys(plan.buckets)}


class LoadError(UserError):
    """An executable that cannot be loaded, with the reason."""


def dump(executable: jax.stages.Compiled) -> bytes:
    """Serialize an executable, for `load_in_background`.

    The bytes are a pickle, so the caller must know that nobody else can have written them.

    NOTE: an executable for the CPU must have been compiled in this process. If it was itself
    loaded, its bytes lack functions when they are loaded again.
    """
    return pickle.dumps(serialize(executable))


def load_in_background(
    dumped: Mapping[GraphKey, bytes], target: Target
) -> dict[GraphKey, Future[jax.stages.Compiled]]:
    """Start to load executables in threads, small executables first.

    Args:
      dumped: Trusted bytes from `dump`.
      target: The devices that the executables were compiled for.

    Returns:
      Futures of the executables; a future raises `LoadError` if its executable cannot be loaded.
    """
    pool = ThreadPoolExecutor(max_workers=os.cpu_count())
    by_size = sorted(dumped.items(), key=lambda item: len(item[1]))
    loading = {key: pool.submit(_load, key, data, target) for key, data in by_size}
    pool.shutdown(wait=False)
    return loading


def _load(key: GraphKey, dumped: bytes, target: Target) -> jax.stages.Compiled:
    try:
        return deserialize_and_load(
            *pickle.loads(dumped),
            backend=target.devices[0].client,
            execution_devices=list(target.devices),
        )
    except Exception as error:  # a pickle may raise anything
        raise LoadError(f"its executable {key} cannot be loaded ({error})") from error
