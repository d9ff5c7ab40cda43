"""Serializes and loads executables; loading traces, lowers and compiles nothing.

The bytes are a pickle, so the caller must know that nobody else can have written them.
"""

import os
import pickle
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from ...compile.targets import Target


class LoadError(ValueError):
    """An executable that cannot be loaded, with the reason."""


def dump(executable: jax.stages.Compiled) -> bytes:
    """Serialize an executable, for `load_in_background`.

    NOTE: an executable for the CPU must have been compiled in this process. If it was itself
    loaded, its bytes lack functions when they are loaded again.
    """
    return pickle.dumps(serialize(executable))


def load_in_background(
    dumped: Mapping[str, bytes], target: Target
) -> dict[str, Future[jax.stages.Compiled]]:
    """Start to load executables in threads, small executables first.

    Args:
      dumped: Trusted bytes from `dump`, by the name of the graph.
      target: The devices that the executables were compiled for.

    Returns:
      Futures by the same names; a future raises `LoadError` if its executable cannot be loaded.
    """
    pool = ThreadPoolExecutor(max_workers=os.cpu_count())
    by_size = sorted(dumped.items(), key=lambda item: len(item[1]))
    loading = {name: pool.submit(_load, name, data, target) for name, data in by_size}
    pool.shutdown(wait=False)
    return loading


def _load(name: str, dumped: bytes, target: Target) -> jax.stages.Compiled:
    try:
        return deserialize_and_load(
            *pickle.loads(dumped),
            backend=target.devices[0].client,
            execution_devices=list(target.devices),
        )
    except Exception as error:  # a pickle may raise anything
        raise LoadError(f"its executable {name} cannot be loaded ({error})") from error
