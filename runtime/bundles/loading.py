"""Executables as bytes, and back: nothing is traced, lowered or compiled when they load.

The bytes are a pickle, so who loads them must know that nobody else can have written them.
"""

import os
import pickle
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from ...compile.targets import Target


class NotLoaded(ValueError):
    """The reason why an executable cannot be loaded."""


def dump(executable: jax.stages.Compiled) -> bytes:
    """The bytes that `load_in_background` takes.

    NOTE: an executable for the CPU must have been compiled in this process. One that was loaded
    lacks functions when its bytes are loaded again.
    """
    return pickle.dumps(serialize(executable))


def load_in_background(
    dumped: Mapping[str, bytes], target: Target
) -> dict[str, Future[jax.stages.Compiled]]:
    """Load executables in threads, small ones first.

    Args:
      dumped: Bytes that `dump` made and that are trusted, by the name of the graph.
      target: The devices that they were compiled for.

    Returns:
      Futures by the same names, whose error is `NotLoaded`.
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
        raise NotLoaded(f"its executable {name} cannot be loaded ({error})") from error
