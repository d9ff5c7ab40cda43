"""The processes that run one job in step, as the job sees them.

Process 0 leads: it owns journal, lock, output, manifest and progress, and says before every step
what comes next. The others read the same input and run the same steps. `Peers` itself is for a job
of one process; `Pod` in `runtime/pods/pod.py` is for several.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeVar

Value = TypeVar("Value")


class StepDirective(NamedTuple):
    """What process 0 says before a step."""

    action: Literal["go", "drain", "stop"]
    """Take in rows; finish those in flight; leave them."""
    signal: str | None = None
    """The signal that ended the going."""


GO = StepDirective("go")


class Peers:
    """This process among those of its job. All of them make the same calls in the same order."""

    size, rank = 1, 0
    setup = "1 process"
    """Processes, devices and collectives, as far as they decide in what order sums run."""

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0."""
        return self.rank == 0

    @property
    def remote_signal(self) -> str | None:
        """To process 0: the name of a signal that another process got."""
        return None

    def broadcast(self, value: Value) -> Value:
        """The value that process 0 passes; it is carried as JSON."""
        return value

    def gather(self, value: Value) -> list[Value]:
        """The values of all processes in their order, carried as JSON; waits for all."""
        return [value]

    def agree(self, facts: Callable[[], Mapping[str, str]]) -> None:
        """Refuse, on every process, facts that are not those of process 0; waits for all."""

    def exchange_directive(self, directive: StepDirective, own_signal: str | None) -> StepDirective:
        """The word of process 0 for the next step; it hears of this process's own signal."""
        del own_signal
        return directive

    def record(self, *facts: object) -> None:
        """Take note of what this process did: before the next step all must have done the same."""

    def on_abort(self, action: Callable[[], object]) -> None:
        """Do this before the loss of another process ends this one on the spot."""

    def await_verdict(self) -> None:
        """After a failure of the devices, wait for what ends this process if another one failed."""


ALONE = Peers()
