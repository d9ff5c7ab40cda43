"""The memory of a target's devices, and the memory that a graph needs on each of them."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from ...compile.compiled_graphs import CompiledGraphs
from ...compile.graph_failures import GraphFailed
from ...compile.hardware.hardware import hardware_of
from ...compile.targets import Target
from ..files.hardware_files import known_hardware
from .machine import host_bytes

GIGABYTE = 10**9
MEMORY_SHARE = 0.9
"""The share of a device's memory for weights and cache; the rest is for temporaries of graphs."""


def device_bytes(target: Target) -> int:
    """The memory of a device in bytes, rounded down to GB, as devices of one kind differ slightly.

    For a CPU it is the memory in the hardware table, so that a job has the same plan on every
    machine.
    """
    if target.platform == "cpu":
        return int(hardware_of(target.name, known_hardware()).memory_bytes)
    # devices of other processes do not report their memory
    own = next(device for device in target.devices if device.process_index == jax.process_index())
    statistics = own.memory_stats() or {}
    return statistics.get("bytes_limit", 0) // GIGABYTE * GIGABYTE


def check_memory(graphs: CompiledGraphs, devices: Iterable[Any]) -> None:
    """Check that every graph fits into the memory of the devices, if both sizes are known.

    Devices of the CPU share the memory of the machine.

    Raises:
      GraphFailed: A graph needs more memory than a device has.
    """
    # devices of other processes report no limit
    own = [device for device in devices if device.process_index == jax.process_index()]
    if all(device.platform == "cpu" for device in own):
        count, limit, whose = len(own), host_bytes(), "memory of this machine"
    else:
        statistics = [device.memory_stats() or {} for device in own]
        limits = [facts["bytes_limit"] for facts in statistics if "bytes_limit" in facts]
        count, limit, whose = 1, min(limits, default=0), "memory of a device that jax may use"
    if not limit:
        return
    for key, executable in graphs.executables.items():
        if (needed := count * required_bytes(executable)) > limit:
            raise GraphFailed(
                key,
                graphs.grid,
                f"does not fit: expected at most {limit / 1e9:.2f} GB, the {whose}, got "
                f"{needed / 1e9:.2f} GB, with weights and cache",
            )


def check_weights(num_bytes: int, devices: Sequence[Any]) -> None:
    """Check that the memory of this machine holds its part of the weights, if it has CPUs alone.

    Raises:
      MemoryError: It does not.
    """
    if any(device.platform != "cpu" for device in devices):
        return
    processes = {device.process_index for device in devices}
    if 0 < (limit := host_bytes()) < num_bytes / len(processes):
        raise MemoryError(f"this machine has {limit / 1e9:.2f} GB of memory")


def required_bytes(executable: jax.stages.Compiled) -> int:
    """Bytes that a graph needs on each device, arguments included; 0 if they are not known."""
    facts = memory_facts(executable)
    if not facts:
        return 0
    # aliased bytes are counted as arguments and as outputs, and reported as aliases
    return sum(facts.values()) - 2 * facts["alias_bytes"]


def memory_facts(executable: jax.stages.Compiled) -> dict[str, int]:
    """Bytes on each device by kind; empty if they are not known."""
    memory = executable.memory_analysis()
    if memory is None:
        return {}
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
    }
