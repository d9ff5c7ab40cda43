"""Prepares jax before it starts its backends.

Does not know about models.
"""

import os
from contextlib import suppress

import jax

from ..errors import UserError, note_start
from .device_shares import simulated_devices


def prepare_jax(target: str, num_processes: int = 1) -> None:
    """Configure jax before it starts: disable backends that a CPU does not use, and simulate CPUs.

    Unused backends start slowly and print warnings. Has no effect if a backend runs already, or if
    the user has chosen platforms or devices.

    Args:
      target: The target's name.
      num_processes: The number of processes, which simulate an equal number of devices each.

    Raises:
      ValueError: jax is configured for 64 bits, or the processes cannot share the devices evenly.
      ForkedProcess: This process was forked from a process that runs jax.
    """
    note_start()
    if jax.dtypes.canonicalize_dtype("int64") != "int32":
        raise UserError(
            "JAX_ENABLE_X64: expected off, as graphs count in 32 bits, got on. Unset it; in a "
            "script call jax.config.update('jax_enable_x64', False) before constructing the LLM."
        )
    count = simulated_devices(target, num_processes)
    if count is None:
        return
    if not jax.config.values["jax_platforms"]:
        jax.config.update("jax_platforms", "cpu")
    is_chosen = "host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    is_chosen |= jax.config.values["jax_num_cpu_devices"] > 0
    if (count > 1 or num_processes > 1) and not is_chosen:
        with suppress(RuntimeError):  # a backend runs already; its devices are counted later
            jax.config.update("jax_num_cpu_devices", count)
