"""What the compiler says of the memory that a graph takes on each device."""

from collections.abc import Iterable
from typing import Any

import jax

from ...compile.compiled_graphs import CompiledGraphs
from ...compile.graph_failures import GraphFailed


def check_memory(graphs: CompiledGraphs, devices: Iterable[Any]) -> None:
    """Raise GraphFailed if a graph needs more memory than a device has, if both are known."""
    # neither devices of other processes nor the CPU tell a limit
    facts = [
        device.memory_stats() for device in devices if device.process_index == jax.process_index()
    ]
    limits = [found["bytes_limit"] for found in facts if found and "bytes_limit" in found]
    if not limits:
        return
    for name, executable in graphs.executables.items():
        if (needed := memory_of(executable)) > min(limits):
            raise GraphFailed(
                name,
                graphs.grid,
                f"does not fit: expected at most {min(limits) / 1e9:.2f} GB, what jax may use of "
                f"a device, got {needed / 1e9:.2f} GB, with weights and cache",
            )


def memory_of(executable: jax.stages.Compiled) -> int:
    """Bytes that a graph needs with all that it is given; 0 where none are known."""
    found = memory_facts(executable)
    if not found:
        return 0
    return sum(found.values()) - 2 * found["alias_bytes"]


def memory_facts(executable: jax.stages.Compiled) -> dict[str, int]:
    """Bytes by kind; empty where none are known."""
    memory = executable.memory_analysis()
    if memory is None:
        return {}
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
    }
