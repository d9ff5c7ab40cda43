"""Serializes and loads executables; loading traces, lowers and compiles nothing.

The bytes are a pickle, so the caller must know that nobody else can have written them.
"""

import os
import pickle
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from ...compile.graphs.graph_kinds import GraphKey
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
