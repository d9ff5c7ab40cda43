"""Executables as bytes, and back without a compiler.

The bytes are jax's own serialisation, which is a pickle: whoever can write them can run code as
whoever loads them. Where they come from is the caller's to check, before it calls `load`. Knows
nothing of files.
"""

import pickle
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.serialize_executable import deserialize_and_load, serialize

from .compiled_graphs import CompiledGraphs


def dump(graphs: CompiledGraphs) -> dict[str, bytes]:
    """Every executable of a grid, by name."""
    return {
        name: pickle.dumps(serialize(executable)) for name, executable in graphs.executables.items()
    }


def load(data: bytes, devices: Sequence[Any]) -> jax.stages.Compiled:
    """One executable for these devices, from bytes that are trusted.

    Nothing is traced, lowered or compiled.
    """
    return deserialize_and_load(
        *pickle.loads(data), backend=devices[0].client, execution_devices=list(devices)
    )
