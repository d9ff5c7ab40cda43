"""Connects the processes of a pod through jax's coordination service, and passes small messages.

Process 0 runs the service, and messages go through its key-value store. No device takes part, so
messages arrive while a collective hangs or a compiler runs. This is the only module that uses jax's
private interface to the service. Tested with jax 0.10; the sources of 0.12 have the same names.

Does not know about jobs. Guarantees: signal handlers stay as they are; if jax aborts this process
because the service is gone, a message says so first.
"""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from typing import Any

from ..console import tell
from ..errors import UserError
from .meeting import Address, meet

CONNECT_SECONDS = 300
"""The time within which processes that have met import jax and connect. If one of them ends, the
others do not wait."""
_LONG_MS = 7 * 24 * 3600 * 1000
_ABORTED = 75

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


class Coordination:
    """This process's connection to the service."""

    def __init__(self, client: Any, rank: int, size: int):
        self.rank = rank
        self.size = size
        self._client = client

    def put(self, key: str, value: bytes) -> None:
        """Store a value, replacing an earlier one."""
        self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def get(self, key: str) -> bytes:
        """The value of a key; waits until there is one."""
        return self._client.blocking_key_value_get_bytes(key, _LONG_MS)

    def folder(self, prefix: str) -> dict[str, bytes]:
        """All values below `prefix/`, by their full keys."""
        return dict(self._client.key_value_dir_get_bytes(f"{prefix}/"))

    def remove_folder(self, prefix: str) -> None:
        """Remove all values below `prefix/`."""
        self._client.key_value_delete(f"{prefix}/")

    def barrier(self, name: str) -> None:
        """Wait until every process has reached the barrier."""
        self._client.wait_at_barrier(name, _LONG_MS)

    def leave(self) -> None:
        """Disconnect, after all other processes have reached this call too."""
        import jax

        jax.distributed.shutdown()


@contextmanager
def connect(
    address: Address | None, *, start_seconds: float, farewell_seconds: float, patience: float
) -> Iterator[Coordination]:
    """Meet the other processes, and connect to them; in the context, the end of one ends all.

    The context ends for all processes together.

    Args:
      address: The coordinator's address; None on a cluster that jax detects.
      start_seconds: Time within which all processes must have come.
      farewell_seconds: Time within which every process must reach `leave`.
      patience: Seconds of silence of one process after which jax ends the others; jax does not name
        the silent process.

    Raises:
      StartFailed: Not all processes have come in time, or one of them failed.
      ValueError: The coordinator's port is not free, or jax detects no cluster.
    """
    address = address or _detected(start_seconds)
    # an import of jax takes seconds, so the others are met before, and watched during it
    with meet(address, start_seconds):
        yield _connect(address, int(farewell_seconds), int(patience))


def _connect(address: Address, farewell_seconds: int, patience: int) -> Coordination:
    """Connect processes that have met."""
    import jax
    from jax._src import distributed

    # jax would handle SIGTERM itself, without telling which process received it
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    failure = (
        f"expected jax to connect all {address.num_processes} processes at {address.coordinator} "
        f"within {CONNECT_SECONDS} s after they had met, but the connection failed (see jax's "
        "messages above). Run the same commands again."
    )
    _report_before_abort(lambda: failure)
    jax.distributed.initialize(
        *astuple(address),
        initialization_timeout=CONNECT_SECONDS,
        heartbeat_timeout_seconds=patience,
        shutdown_timeout_seconds=farewell_seconds,
    )
    state = distributed.global_state
    rank, size = state.process_id, state.num_processes
    service = str(state.coordinator_address)
    _report_before_abort(lambda: _service_loss(rank, service))
    return Coordination(state.client, rank, size)


def _detected(seconds: float) -> Address:
    """The address on the cluster that jax detects (TPU pods, Slurm, Open MPI, Kubernetes)."""
    from jax._src.clusters import ClusterEnv

    found = ClusterEnv.auto_detect_unset_distributed_params(
        None, None, None, None, None, int(seconds)
    )
    coordinator, num_processes, process_id, _ = found
    if coordinator is None or num_processes is None or process_id is None:
        raise UserError(
            "--distributed auto: expected a cluster that jax can detect, got none. Give "
            "--coordinator, --num-processes and --process-id."
        )
    return Address(coordinator, num_processes, process_id)


def _service_loss(rank: int, service: str) -> str | None:
    """The message for an abort because the service is gone; None if the service is reachable."""
    if rank == 0:
        return None
    host, _, port = service.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1):
            return None
    except OSError:
        return f"process {rank}: process 0, which coordinates the others, is gone; ending."


def _report_before_abort(message_of_abort: Callable[[], str | None]) -> None:
    """Print a message and exit when native code aborts the process; without a message, abort.

    jax aborts (SIGABRT) from one of its own threads, in which no Python signal handler runs.
    """
    global _handler

    def handle(number: int) -> None:
        del number
        if message := message_of_abort():
            tell(sys.stderr, f"noria: {message}")
            os._exit(_ABORTED)

    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, _Handler)
    libc.signal.restype = ctypes.c_void_p
    native_handler = _Handler(handle)
    libc.signal(signal.SIGABRT, native_handler)
    _handler = native_handler


_handler: Any = None
"""The native handler; a reference that keeps it alive while the system may call it."""
