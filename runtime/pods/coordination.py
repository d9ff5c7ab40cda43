"""jax's coordination service: how the processes of a pod find each other and pass small messages.

Process 0 runs the service, and the messages go through its key-value store: no device takes part,
so they get through while a collective hangs or a compiler runs. The only module that reaches into
jax for it. Tested with jax 0.10; the sources of 0.12 have the same names.

Knows nothing of jobs. Guarantees: signal handlers stay as they are; when jax ends this process
because the service is gone, a line of ours says so first.
"""

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

from ..console import tell

CONNECT_SECONDS = 300
_LONG_MS = 7 * 24 * 3600 * 1000
_ABORTED = 75

_Handler = ctypes.CFUNCTYPE(None, ctypes.c_int)


@dataclass(frozen=True)
class Address:
    """Where the processes meet, how many there are, and which one this is."""

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
        """Store a value in place of what was there."""
        self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def get(self, key: str) -> bytes:
        """The value of a key, as soon as there is one."""
        return self._client.blocking_key_value_get_bytes(key, _LONG_MS)

    def folder(self, prefix: str) -> dict[str, bytes]:
        """All there is below `prefix/`, by its full key."""
        return dict(self._client.key_value_dir_get_bytes(f"{prefix}/"))

    def remove_folder(self, prefix: str) -> None:
        self._client.key_value_delete(f"{prefix}/")

    def barrier(self, name: str) -> None:
        """Wait until every process is here."""
        self._client.wait_at_barrier(name, _LONG_MS)

    def leave(self) -> None:
        """Part from the others, when all of them are here; waits for them."""
        import jax

        jax.distributed.shutdown()


def connect(address: Address | None, *, farewell_seconds: float, patience: float) -> Coordination:
    """Meet the other processes, at most five minutes; without an address as the cluster tells.

    Every process must be at `leave` within `farewell_seconds`. jax itself ends processes when one
    of them has been silent for `patience` seconds; it does not say which.
    """
    import jax
    from jax._src import distributed

    if address is not None and address.process_id == 0:
        _check_port(address.coordinator)
    # jax would take SIGTERM for itself, and tell nobody which process got it
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _speak_before_abort(lambda: _why_not_connected(address))
    given = (None, None, None) if address is None else astuple(address)
    # Ctrl-C must end a process that waits in native code for others
    previous = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        jax.distributed.initialize(
            *given,
            initialization_timeout=CONNECT_SECONDS,
            heartbeat_timeout_seconds=int(patience),
            shutdown_timeout_seconds=int(farewell_seconds),
        )
    except ValueError as error:  # jax's way to say that it found no cluster
        raise ValueError(
            f"--distributed auto: expected a cluster that says where its processes are, got: "
            f"{error} Name them with --coordinator, --num-processes and --process-id."
        ) from error
    finally:
        signal.signal(signal.SIGINT, previous)
    state = distributed.global_state
    rank, size = state.process_id, state.num_processes
    service = str(state.coordinator_address)
    _speak_before_abort(lambda: _why_lost(rank, service))
    return Coordination(state.client, rank, size)


def _check_port(coordinator: str) -> None:
    """jax ends the process without a word where its service cannot listen."""
    port = int(coordinator.rpartition(":")[2])
    try:
        # as the service binds it: all addresses of this host
        with socket.create_server(("", port)):
            return
    except OSError as error:
        raise ValueError(
            f"--coordinator {coordinator}: process 0 cannot listen on port {port} "
            f"({os.strerror(error.errno or 0)}). Choose a port that is free."
        ) from error


def _why_not_connected(address: Address | None) -> str:
    who, where = "the processes", ""
    if address is not None:
        who, where = f"all {address.num_processes} processes", f" at {address.coordinator}"
    return (
        f"expected {who} to meet{where} within {CONNECT_SECONDS} s, and could not (jax says more "
        "above). Start the same command once for every --process-id, none twice, and see that the "
        "coordinator's port can be reached."
    )


def _why_lost(rank: int, service: str) -> str | None:
    """What to say of an abort: the service's end, or nothing that this module knows of."""
    if rank == 0:
        return None
    host, _, port = service.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=1):
            return None
    except OSError:
        return f"process {rank}: process 0, which coordinates the others, is gone; ending."


def _speak_before_abort(last_words: Callable[[], str | None]) -> None:
    """Before native code aborts the process, print a line and leave; without words let it abort.

    jax aborts (SIGABRT) from a thread of its own, where no Python handler would run any more.
    """
    global _handler

    def handle(number: int) -> None:
        del number
        if words := last_words():
            tell(sys.stderr, f"noria: {words}")
            os._exit(_ABORTED)

    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, _Handler)
    libc.signal.restype = ctypes.c_void_p
    kept = _Handler(handle)
    libc.signal(signal.SIGABRT, kept)
    _handler = kept


_handler: Any = None
"""Kept for as long as the system may call it."""
