"""The options with which the processes of a command find each other, and wait for each other.

Imports no jax: jax's distributed service starts when the processes connect.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from ..errors import ConfigError
from .peers import ALONE, Peers


@dataclass(frozen=True)
class PodOptions:
    """The options with which processes find each other; by default there is one process."""

    coordinator: str | None = None
    """The address on which process 0 listens."""
    num_processes: int | None = None
    process_id: int | None = None
    distributed: Literal["auto"] | None = None
    """`auto` takes these three from the cluster."""
    peer_timeout_seconds: float = 60.0
    """Seconds of silence after which another process counts as lost."""
    start_timeout_seconds: float = 300.0
    """Seconds within which all processes must have come."""

    @property
    def are_given(self) -> bool:
        """Whether any option says that several processes run the command."""
        address = (self.coordinator, self.num_processes, self.process_id)
        return self.distributed is not None or any(part is not None for part in address)

    @contextmanager
    def peers(self, target: str) -> Iterator[Peers]:
        """Connect to the other processes of the command, or return `ALONE` if there are none."""
        address = (self.coordinator, self.num_processes, self.process_id)
        if address.count(None) not in (0, 3) or (self.distributed and address.count(None) != 3):
            raise ConfigError(
                "--coordinator, --num-processes, --process-id: expected all three, or none of "
                "them, or --distributed auto alone. Give every process the same coordinator and "
                "number, and an id of its own."
            )
        if address.count(None) == 3 and not self.distributed:
            yield ALONE
            return
        from ..devices.compiler_messages import without_alarms
        from .meeting import Address
        from .pod import join

        given = None
        if not (self.coordinator is None or self.num_processes is None or self.process_id is None):
            given = Address(self.coordinator, self.num_processes, self.process_id)
        start = self.start_timeout_seconds
        joined = join(given, self.peer_timeout_seconds, target, start_seconds=start)
        with without_alarms(), joined as pod:
            yield pod
