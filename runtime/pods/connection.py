"""Connections between the processes of a pod before jax connects them: lines of JSON over sockets.

Does not know what the messages mean, but for a failure. Guarantees: a program that is no noria on
the other side counts as gone.
"""

import json
import select
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from ..errors import StartFailed

POLL_SECONDS = 0.2
_MAX_BYTES = 2**16


class Connection:
    """A socket that carries lines of JSON.

    Attributes:
      is_connected: Whether the other side has said that it is connected to all.
    """

    def __init__(self, sock: socket.socket):
        self.socket = sock
        self.is_connected = False
        self._received = b""

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a message, unless the other side has gone."""
        with suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def fail(self, failure: StartFailed) -> None:
        """Send the reason why the pod does not start."""
        self.send({"failed": str(failure), "exit_code": failure.exit_code})

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have arrived; None if the other side has gone or is no noria."""
        try:
            received = self.socket.recv(_MAX_BYTES)
        except OSError:
            return None
        *lines, self._received = (self._received + received).split(b"\n")
        if not received or len(self._received) > _MAX_BYTES:
            return None
        try:
            messages = [json.loads(line) for line in lines]
        except ValueError:
            return None
        if not all(isinstance(one, dict) for one in messages):
            return None
        self.is_connected |= any("connected" in one for one in messages)
        return messages

    def has_gone(self) -> bool:
        """Whether the other side has closed the connection."""
        return bool(select.select([self], [], [], 0)[0]) and self.receive() is None


def raise_failure(messages: Iterable[Mapping[str, Any]]) -> None:
    """Raise the failure that a process reports, if any does."""
    for message in messages:
        if "failed" in message:
            code = message.get("exit_code")
            raise StartFailed(str(message["failed"]), code if isinstance(code, int) else 1)


def wait_for_ends(connections: list[Connection], seconds: float = 2.0) -> None:
    """Wait until the other sides have closed their connections, but not for long."""
    until = time.monotonic() + seconds
    while connections and time.monotonic() < until:
        ready, _, _ = select.select(connections, [], [], POLL_SECONDS)
        connections = [one for one in connections if one not in ready or one.receive() is not None]
