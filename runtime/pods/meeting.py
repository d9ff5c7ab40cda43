"""The meeting of a pod's processes, before jax connects them.

Process 0 listens at the coordinator's address, and every other process connects and says its
number. While they wait, all of them say which processes are missing. When all have come, process 0
lets them go, and jax's service takes the port. Until jax has connected them, their connections stay
open, so that the end of one ends all. A process that fails tells process 0, which tells all others.
`report_failure` does so for a process that fails before it comes to the meeting.

Does not know about jobs or jax. Guarantees: after the limit, every process ends with a message that
names what is missing.
"""

import os
import select
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from .. import errors
from ..console import plural, tell
from ..errors import EXIT_RESUMABLE, StartFailed, UserError
from ..process.stop_signals import at_forced_end, end_process
from .connection import POLL_SECONDS, Connection, raise_failure, wait_for_ends

START_SECONDS = 300.0
QUIET_SECONDS = 10.0
"""The time after which processes say whom they wait for, and again after each such time."""
LINGER_SECONDS = 10.0
"""The time for which a process that failed before the meeting waits for the others."""
_REMEDY = (
    "Start the same command exactly once for every --process-id, and check that every host reaches "
    "the coordinator's address and port."
)
_begun = False


@dataclass(frozen=True)
class Address:
    """The coordinator's address, the number of processes, and the number of this process."""

    coordinator: str
    num_processes: int
    process_id: int

    def __post_init__(self):
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            raise UserError(f"--coordinator: expected HOST:PORT, got {self.coordinator!r}.")
        if self.num_processes < 1:
            raise UserError(f"--num-processes: expected at least 1, got {self.num_processes}.")
        if not 0 <= self.process_id < self.num_processes:
            raise UserError(
                f"--process-id: expected 0 to {self.num_processes - 1}, as --num-processes is "
                f"{self.num_processes}, got {self.process_id}."
            )

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The coordinator's host, without the brackets of IPv6, and its port."""
        host, _, port = self.coordinator.rpartition(":")
        return host.strip("[]"), int(port)


@contextmanager
def meet(address: Address, limit: float) -> Iterator[None]:
    """Wait until all processes of the pod have come; in the context, the end of one ends all.

    The context ends for all processes together.

    Args:
      address: The meeting's place, and the number of this process.
      limit: Seconds to wait.

    Raises:
      StartFailed: A process did not come in time, failed, or does not belong to the pod.
      ValueError: The coordinator's port is not free.
    """
    global _begun
    _begun = True
    come = _gather if address.process_id == 0 else _attend
    made: list[Connection] = []
    with ExitStack() as opened:
        try:
            others = come(address, limit, opened, made)
            with _watched(address, others):
                yield
        except BaseException as error:
            # a signal may raise between any two lines
            failure = _failure_of(error, address)
            for connection in made:
                connection.fail(failure)
            raise


def report_failure(address: Address, message: str, code: int, seconds: float) -> None:
    """Tell the others that this process failed, if it has not come to the meeting yet.

    Args:
      address: The meeting's place, and the number of this process.
      message: The reason.
      code: The exit code of this process.
      seconds: Time to wait for the others.
    """
    if _begun or address.num_processes == 1:
        return
    failure = StartFailed(f"process {address.process_id} failed before the start: {message}", code)
    until = time.monotonic() + seconds
    with suppress(OSError, ValueError, StartFailed):
        if address.process_id == 0:
            with _listening(address) as listener:
                _refuse(listener, failure, until, address.num_processes - 1)
        else:
            _send_failure(address, failure, until)


class _Patience:
    """Says, after every `QUIET_SECONDS`, whom a process waits for and how long yet."""

    def __init__(self, address: Address, limit: float):
        self._rank, self._limit = address.process_id, limit
        self._start = time.monotonic()
        self._quiet_until = self._start + QUIET_SECONDS

    @property
    def left(self) -> float:
        """Seconds to the limit."""
        return self._start + self._limit - time.monotonic()

    def remind(self, what: str) -> bool:
        """Say that this process waits, if it is time to; return whether it was."""
        if time.monotonic() < self._quiet_until:
            return False
        self._quiet_until += QUIET_SECONDS
        rank, left = self._rank, max(0.0, self.left)
        tell(sys.stderr, f"noria: process {rank}: waits for {what}, at most {left:.0f} s more")
        return True


@contextmanager
def _listening(address: Address) -> Iterator[socket.socket]:
    """Listen on the coordinator's port, on all addresses of this host, as jax's service does."""
    port = address.host_and_port[1]
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    try:
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=has_both)
    except OSError as error:
        raise UserError(
            f"--coordinator {address.coordinator}: process 0 cannot listen on port {port} "
            f"({os.strerror(error.errno or 0)}). Choose a port that is free."
        ) from error
    with listener:
        yield listener


def _gather(
    address: Address, limit: float, opened: ExitStack, made: list[Connection]
) -> dict[int, Connection]:
    """Wait for all other processes, as process 0; return their connections.

    Every connection is added to `made`, those of strangers as well.
    """
    patience = _Patience(address, limit)
    others = set(range(1, address.num_processes))
    members: dict[int, Connection] = {}
    strangers: list[Connection] = []
    with _listening(address) as listener:
        try:
            while missing := sorted(others - members.keys()):
                if patience.left <= 0:
                    raise StartFailed(
                        f"expected all {address.num_processes} processes to connect to "
                        f"{address.coordinator} within {limit:g} s, but {_listed(missing)} did "
                        f"not. {_REMEDY}"
                    )
                if patience.remind(_listed(missing)):
                    for member in members.values():
                        member.send({"waits_for": _listed(missing)})
                ready, _, _ = select.select(
                    [listener, *strangers, *members.values()], [], [], POLL_SECONDS
                )
                for rank, member in list(members.items()):
                    # a process says no more than hello, but for a failure
                    said = member.receive() if member in ready else []
                    if said is None:
                        del members[rank]
                    else:
                        raise_failure(said)
                if listener in ready:
                    accepted = opened.enter_context(listener.accept()[0])
                    made.append(Connection(accepted))
                    strangers.append(made[-1])
                for stranger in [one for one in strangers if one in ready]:
                    if (hellos := stranger.receive()) != []:
                        strangers.remove(stranger)
                    for hello in hellos or []:
                        members[_rank_of(hello, address, members)] = stranger
        except StartFailed as failure:
            for connection in made:
                connection.fail(failure)
            if patience.left > 0:
                until = time.monotonic() + min(LINGER_SECONDS, patience.left)
                _refuse(listener, failure, until, address.num_processes - 1 - len(made))
            raise
    # only now, as the port is free for jax
    for member in members.values():
        member.send({"go": True})
    return members


def _rank_of(hello: Mapping[str, Any], address: Address, members: Mapping[Any, Connection]) -> int:
    """The number of a process that has come.

    Raises:
      StartFailed: The process reports a failure, or does not belong to this pod.
    """
    raise_failure([hello])
    rank, size, release = (hello.get(key) for key in ("rank", "size", "noria"))
    if size != address.num_processes:
        raise StartFailed(
            f"--num-processes: expected the same number on all processes, got "
            f"{address.num_processes} on process 0 and {size} on process {rank}."
        )
    if release != version("noria"):
        raise StartFailed(
            f"expected one version of noria on all processes, got {version('noria')} on process 0 "
            f"and {release} on process {rank}."
        )
    expected = f"--process-id: expected every number from 0 to {address.num_processes - 1} once"
    if not isinstance(rank, int) or rank not in range(address.num_processes):
        raise StartFailed(f"{expected}, got {rank}. {_REMEDY}")
    known = members.get(rank)
    if rank == 0 or (known is not None and not known.has_gone()):
        raise StartFailed(f"{expected}, got {rank} twice. {_REMEDY}")
    return rank


def _attend(
    address: Address, limit: float, opened: ExitStack, made: list[Connection]
) -> dict[int, Connection]:
    """Connect to process 0 and wait until it lets this process go; return the connection.

    Every connection is added to `made`.
    """
    patience = _Patience(address, limit)
    reason = "nothing listens there"
    while patience.left > 0:
        try:
            connected = socket.create_connection(address.host_and_port, timeout=5)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            opened.enter_context(connected)
            connection = Connection(connected)
            made.append(connection)
            if _is_let_go(connection, address, patience):
                return {0: connection}
            connected.close()
            reason = "the program there ends the connection"
        patience.remind(f"process 0 at {address.coordinator} ({reason})")
        time.sleep(POLL_SECONDS)
    raise StartFailed(
        f"expected process 0 to answer at {address.coordinator} within {limit:g} s, but it did not "
        f"({reason}). {_REMEDY}"
    )


def _is_let_go(connection: Connection, address: Address, patience: _Patience) -> bool:
    """Wait until process 0 lets this process go; return False if it is gone itself.

    Raises:
      StartFailed: The pod does not start.
    """
    rank, size = address.process_id, address.num_processes
    connection.send({"rank": rank, "size": size, "noria": version("noria")})
    what = "process 0"
    # process 0 has the same limit, and names whoever is missing
    while patience.left > -POLL_SECONDS * 10:
        patience.remind(what)
        if not select.select([connection], [], [], POLL_SECONDS)[0]:
            continue
        if (messages := connection.receive()) is None:
            return False
        raise_failure(messages)
        for message in messages:
            what = message.get("waits_for", what)
            if "go" in message:
                return True
    raise StartFailed(
        f"expected all {size} processes to come to {address.coordinator} in time, but "
        f"{'not all came' if what == 'process 0' else f'{what} did not'}. {_REMEDY}"
    )


@contextmanager
def _watched(address: Address, others: Mapping[int, Connection]) -> Iterator[None]:
    """End this process if another one ends in the context, and tell the others if this one does."""
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(address, others, done), daemon=True)

    def fail(failure: StartFailed) -> None:
        for other in others.values():
            other.fail(failure)

    reason = f"process {address.process_id} was stopped by a signal"
    with at_forced_end(lambda code: fail(StartFailed(reason, code))):
        try:
            watch.start()
            yield
            for other in others.values():
                other.send({"connected": True})
            # one that fails before it is connected can tell the others here alone
            watch.join()
        finally:
            done.set()


def _watch(address: Address, others: Mapping[int, Connection], done: threading.Event) -> None:
    """Wait until all others are connected, and end this process if one of them ends before."""
    left = {rank: other for rank, other in others.items() if not other.is_connected}
    while left and not done.is_set():
        ready = select.select(list(left.values()), [], [], POLL_SECONDS)[0]
        for rank, other in [item for item in left.items() if item[1] in ready]:
            messages = other.receive()
            try:
                if messages is None:
                    raise StartFailed(
                        f"process {rank} ended while the processes connected. Run the same "
                        "commands again.",
                        EXIT_RESUMABLE,
                    )
                raise_failure(messages)
            except StartFailed as failure:
                for one in others.values():
                    one.fail(failure)
                end_process(f"process {address.process_id}: {failure}", failure.exit_code)
            if other.is_connected:
                del left[rank]


def _failure_of(error: BaseException, address: Address) -> StartFailed:
    """The failure that other processes are told of for an error of this process."""
    if isinstance(error, StartFailed):
        return error
    message = f"process {address.process_id} ended: {errors.message(error)}"
    return StartFailed(message, errors.exit_code(error))


def _refuse(listener: socket.socket, failure: StartFailed, until: float, count: int) -> None:
    """Tell a number of processes that come later, as process 0."""
    told: list[Connection] = []
    with ExitStack() as opened:
        while len(told) < count and time.monotonic() < until:
            if select.select([listener], [], [], POLL_SECONDS)[0]:
                told.append(Connection(opened.enter_context(listener.accept()[0])))
                told[-1].fail(failure)
        wait_for_ends(told)


def _send_failure(address: Address, failure: StartFailed, until: float) -> None:
    """Tell process 0, as another process, as soon as it listens."""
    while time.monotonic() < until:
        with suppress(OSError), socket.create_connection(address.host_and_port, 1) as connected:
            connection = Connection(connected)
            connection.fail(failure)
            wait_for_ends([connection])
            return
        time.sleep(POLL_SECONDS)


def _listed(ranks: list[int]) -> str:
    """The numbers of processes, in words."""
    shown = ", ".join(map(str, ranks[:8]))
    more = "" if len(ranks) <= 8 else f" and {plural(len(ranks) - 8, 'other')}"
    return f"process{'es' if len(ranks) > 1 else ''} {shown}{more}"
