"""What the compiler says of the memory that a graph takes on each device."""

import jax


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
