"""The loop of calls that answers requests, whatever the method that makes the answers.

A call has three steps, so that the device does not wait for the host's work: `dispatch` starts the
next action; `receive` waits for its end and reads what the action after it depends on; `collect`
reads the rest while the next graph runs. Each method, such as generation, is a subclass: it queues
requests, chooses actions, packs them into calls of graphs, and reads the outputs.

Does not know about files or command lines; `LLM` and the batch job both use it. Guarantees: every
submitted request is returned exactly once.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Self, TypeVar

from ...compile.graph_failures import naming_graph
from ...compile.graphs.graph_kinds import GraphKey
from ...compile.monitor import compile_monitor
from ..errors import check_process
from ..request import RequestOutput
from .call_results import CallResults
from .metrics import EngineMetrics, ExpertSetup
from .model_runner import GraphCall, ModelRunner

ActionType = TypeVar("ActionType")
EntryType = TypeVar("EntryType")
"""The data of a request that was submitted and not yet returned."""


class _InFlight(NamedTuple):
    """A call that was dispatched and not yet received."""

    action: Any
    key: GraphKey
    output: Any
    start: float


@dataclass(kw_only=True)
class Engine(ABC, Generic[ActionType, EntryType]):
    """The calls of a session, in flight and received.

    Attributes:
      runner: The model on its devices.
      experts: The model's experts and their dispatch, for the report; None for a dense model.
      attention: The attention kernel of each phase with the reason for the choice, for the report.
      clock: Monotonic seconds.
      metrics: The counters of the run.
    """

    runner: ModelRunner
    experts: ExpertSetup | None = None
    attention: Mapping[str, str] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    metrics: EngineMetrics = field(default_factory=EngineMetrics, init=False)
    _open: dict[int, EntryType] = field(default_factory=dict, init=False)
    _num_submitted: int = field(default=0, init=False)
    _in_flight: _InFlight | None = field(default=None, init=False)
    _received: list[CallResults] = field(default_factory=list, init=False)
    """Calls that were received and not yet collected."""

    def __post_init__(self):
        self._compiles_at_start = compile_monitor().num_compiles

    @property
    def unfinished(self) -> int:
        """The number of requests that were submitted and not yet returned."""
        return len(self._open)

    @abstractmethod
    def next_action(self) -> ActionType | None:
        """Choose the next action; None if no work is left."""

    @abstractmethod
    def pack(self, action: ActionType) -> Sequence[GraphCall]:
        """The calls that carry out an action; the last one has its output."""

    @abstractmethod
    def read(self, results: CallResults) -> bytes:
        """Read what the next action depends on; return bytes as `receive` does."""

    @abstractmethod
    def finish(self, received: Sequence[CallResults]) -> list[RequestOutput]:
        """Count calls, read all of their results, and return the requests that ended.

        The output of a copy is None, and its seconds are those of the host.
        """

    def fetched(self, action: ActionType, output: Any) -> Any:
        """The part of an action's output to copy to the host."""
        del action
        return output

    def dispatch(self) -> ActionType | None:
        """Start the next action; the previous one must have been received.

        Returns:
          The action; None if no work is left.

        Raises:
          GraphFailed: A graph of the action failed to start.
        """
        check_process()
        assert self._in_flight is None
        if (action := self.next_action()) is None:
            return None
        start, output = self.clock(), None
        calls = self.pack(action)
        with naming_graph(calls[-1].key, self.runner.grid, "failed as it ran"):
            for call in calls:
                output = self.runner.call(call)
        if output is None:
            now = self.clock()
            self._received.append(CallResults(action, None, now - start, now))
        else:
            self._in_flight = _InFlight(action, calls[-1].key, output, start)
        return action

    def receive(self) -> bytes:
        """Wait for the call in flight, and read what the next action depends on.

        Returns:
          Bytes of the results that must be equal on all processes of a pod.

        Raises:
          GraphFailed: The call failed, or ran out of memory.
        """
        if (call := self._in_flight) is None:
            return b""
        with naming_graph(call.key, self.runner.grid, "failed as it ran"):
            output = self.runner.host.fetch(self.fetched(call.action, call.output))
        self._in_flight = None
        now = self.clock()
        results = CallResults(call.action, output, now - call.start, now)
        self._received.append(results)
        return self.read(results)

    def collect(self) -> list[RequestOutput]:
        """Return the requests that ended in the calls received since the last `collect`."""
        received, self._received = self._received, []
        return self.finish(received)

    def step(self) -> list[RequestOutput]:
        """Wait for the last action, start the next, and return the requests that have ended."""
        self.receive()
        action = self.dispatch()
        finished = self.collect()
        assert action or not self.unfinished, f"{self.unfinished} requests have no work left"
        return finished

    def run(self) -> list[RequestOutput]:
        """Step until every submitted request has ended; return all outputs."""
        outputs = []
        while self.unfinished:
            outputs += self.step()
        return outputs

    def restarted(self, run_seed: int) -> Self:
        """A session for the next rows, with a seed and counters of its own; no row may be open."""
        del run_seed
        assert not self.unfinished
        return replace(self)

    def abandon(self) -> None:
        """Drop every request; valid after an interrupted step too."""
        self._open.clear()
        self._in_flight = None
        self._received.clear()
        self.runner.reset()

    def statistics(self) -> dict[str, Any]:
        """The counters of the run so far, as a dict that can be written as JSON."""
        metrics, experts = self.metrics, self.experts
        compiles = compile_monitor().compiles[self._compiles_at_start :]
        return {
            **metrics.report(),
            "attention": dict(self.attention),
            **({} if experts is None else {"experts": experts.report(metrics.experts)}),
            "compiles_during_run": len(compiles),
            **({"unexpected_compiles": compiles} if compiles else {}),
        }
