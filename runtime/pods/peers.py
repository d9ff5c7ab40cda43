"""The interface between a job and the other processes that run it in step.

Process 0 is the leader: it owns journal, lock, output, manifest and progress, and sends a directive
before every step. The other processes read the same input and run the same steps. `Peers` itself is
for a job of one process; `Pod` in `runtime/pods/pod.py` is for several.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, TypeVar

Value = TypeVar("Value")


class StepDirective(NamedTuple):
    """The message of process 0 before a step."""

    action: Literal["go", "drain", "stop"]
    """`go`: submit rows and run; `drain`: only finish the rows in flight; `stop`: leave them."""
    signal: str | None = None
    """The name of the signal that ended `go`."""


GO = StepDirective("go")


class Peers:
    """This process and the other processes of its job, which all make the same calls in order."""

    size, rank = 1, 0
    setup = "1 process"
    """The processes, devices and collectives: what the order of floating-point sums depends on."""

    @property
    def is_leader(self) -> bool:
        """Whether this is process 0."""
        return self.rank == 0

    @property
    def remote_signal(self) -> str | None:
        """The name of a signal that another process received; None if there is none."""
        return None

    def broadcast(self, value: Value) -> Value:
        """Return the value that process 0 passes; it is sent as JSON."""
        return value

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all processes in rank order, sent as JSON; waits for all of them."""
        return [value]

    def agree(self, facts: Callable[[], Mapping[str, str]]) -> None:
        """Check that the facts equal the facts of process 0; waits for all processes.

        Raises:
          ValueError: The facts differ; the error lists every difference.
        """

    def exchange_directive(self, directive: StepDirective, own_signal: str | None) -> StepDirective:
        """Return the directive of process 0 for the next step.

        Args:
          directive: The directive to send, if this is process 0; the others ignore theirs.
          own_signal: The name of a signal that this process received, to report to process 0.

        Raises:
          OutOfStep: This process has recorded other facts than process 0.
        """
        del own_signal
        return directive

    def record(self, *facts: object) -> None:
        """Record facts of this process's work; at each step all processes must have equal facts."""

    def on_abort(self, action: Callable[[], object]) -> None:
        """Set an action to run if the loss of another process ends this process immediately."""

    def await_verdict(self) -> None:
        """Wait, after a device failure, in case the loss of another process is its cause.

        If another process is lost, this process ends during the wait.
        """


ALONE = Peers()
