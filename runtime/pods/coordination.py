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
import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

from ..console import tell

CONNECT_SECONDS = 300
QUIET_SECONDS = 20
"""Time after which a process says that it waits for the others."""
_LONG_MS = 7 * 24 * 3600 * 1000
_ABORTED = 75

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


@dataclass(frozen=True)
class Address:
    """The coordinator's address, the number of processes, and the number of this process."""

    coordinator: str
    num_processes: int
    process_id: int

    def __post_init__(self):
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f"--coordinator: expected HOST:PORT, got {self.coordinator!r}.")
        if self.num_processes < 1:
            raise ValueError(f"--num-processes: expected at least 1, got {self.num_processes}.")
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"--process-id: expected 0 to {self.num_processes - 1}, as --num-processes is "
                f"{self.num_processes}, got {self.process_id}."
            )


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


def connect(address: Address | None, *, farewell_seconds: float, patience: float) -> Coordination:
    """Connect to the other processes, within `CONNECT_SECONDS`.

    Args:
      address: The coordinator's address; None on a cluster that jax detects.
      farewell_seconds: Time within which every process must reach `leave`.
      patience: Seconds of silence of one process after which jax ends the others; jax does not name
        the silent process.

    Raises:
      ValueError: The coordinator's port is not free, or jax detects no cluster.
    """
    import jax
    from jax._src import distributed

    if address is not None and address.process_id == 0:
        _check_port(address.coordinator)
    # jax would handle SIGTERM itself, without telling which process received it
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _report_before_abort(lambda: _connection_failure(address))
    given = (None, None, None) if address is None else astuple(address)
    waits = threading.Timer(QUIET_SECONDS, tell, (sys.stderr, _waiting(address)))
    waits.daemon = True
    waits.start()
    try:
        jax.distributed.initialize(
            *given,
            initialization_timeout=CONNECT_SECONDS,
            heartbeat_timeout_seconds=int(patience),
            shutdown_timeout_seconds=int(farewell_seconds),
        )
    except ValueError as error:  # jax found no cluster
        raise ValueError(
            f"--distributed auto: expected a cluster that jax can detect, got: {error} Give "
            f"--coordinator, --num-processes and --process-id."
        ) from error
    finally:
        waits.cancel()
    state = distributed.global_state
    rank, size = state.process_id, state.num_processes
    service = str(state.coordinator_address)
    _report_before_abort(lambda: _service_loss(rank, service))
    return Coordination(state.client, rank, size)


def _check_port(coordinator: str) -> None:
    """Refuse a port that is not free, with which jax would end the process without a message."""
    port = int(coordinator.rpartition(":")[2])
    try:
        # on all addresses of this host, as jax's service binds it
        with socket.create_server(("", port)):
            return
    except OSError as error:
        raise ValueError(
            f"--coordinator {coordinator}: process 0 cannot listen on port {port} "
            f"({os.strerror(error.errno or 0)}). Choose a port that is free."
        ) from error


def _waiting(address: Address | None) -> str:
    """The message of a process that has waited for a while for the others to connect."""
    where = "" if address is None else f" at {address.coordinator}"
    return f"noria: waits{where} for the other processes, at most {CONNECT_SECONDS} s in all"


def _connection_failure(address: Address | None) -> str:
    """The message for processes that did not connect in time."""
    who, where = "the processes", ""
    if address is not None:
        who, where = f"all {address.num_processes} processes", f" at {address.coordinator}"
    return (
        f"expected {who} to connect{where} within {CONNECT_SECONDS} s, but the connection failed "
        "(see jax's messages above). Start the same command exactly once for every --process-id, "
        "and check that the coordinator's port can be reached."
    )


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
