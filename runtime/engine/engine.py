"""Runs the scheduler's actions on the device, in token ids.

An action has three steps, so that the device does not wait for the host's work: `dispatch` starts
the graph; `receive` waits for its end and frees the slots of sequences that ended, and the next
action depends on nothing else; `events` reports the results while the next graph runs.

Does not know about text, files or stop strings. Only ids, flags, expert counts and, if requested,
log-probabilities are copied to the host after a call. Guarantees: nothing compiles, as the graphs
are given; all transfers are explicit; a sequence with non-finite logits ends without effect on the
others.
"""

import time
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ...compile.compiled_graphs import CompiledGraphs
from ...compile.graph_failures import naming_graph
from ...compile.graphs.graph_kinds import CLEAR_PREFIX, FORK, PREFIX, GraphKey
from ...compile.graphs.prefill_steps import PrefillOutput
from ...compile.graphs.steps import DecodeOutput, DecodeState
from ...compile.grids.prefix_grid import PlannedPrefix
from ...modelzoo.sampling import SamplingState
from ...modelzoo.structure import StructureTables
from ..devices.host_arrays import HostArrays
from .actions import (
    Action,
    DecodeAction,
    ForkAction,
    PrefillAction,
    PrefixAction,
    PromptPiece,
    ScheduledSequence,
)
from .admission import AdmittedRequest
from .call_results import CallResults, Event
from .metrics import EngineMetrics, PrefillUse
from .padding import greedy_sampling, pack_pieces, pack_prefix, pack_requests, pack_sampling
from .prompt_scores import PromptScores, num_alternatives
from .scheduler import Scheduler


@dataclass(frozen=True)
class _InFlight:
    """A call that was dispatched and not yet received."""

    action: PrefillAction | PrefixAction | DecodeAction
    key: GraphKey
    output: Any
    start: float


class Engine:
    """The decode state on the device, and the requests in its slots.

    Args:
      graphs: The executables of a plan.
      parameters: The model's parameters on the devices, by dotted path.
      state: An empty decode state; every call donates it.
      host: The transfers between host and devices.
      padded_vocab: The vocabulary size of the logits, padding included.
      structures: The automata of the plan on the devices; None in a plan without them.
      clock: Monotonic seconds.
    """

    def __init__(
        self,
        graphs: CompiledGraphs,
        parameters: Mapping[str, jax.Array],
        state: DecodeState,
        host: HostArrays,
        padded_vocab: int,
        structures: StructureTables | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.metrics = EngineMetrics()
        self.prefix_ids: dict[PlannedPrefix, array[int]] = {}
        """The token ids of planned prefixes. Those of a request are added before it is submitted.
        """
        self._prefix_adapters: dict[PlannedPrefix, int] = {}
        """The number of the adapter of planned prefixes, in a plan with adapters."""
        self._graphs = graphs
        self.scheduler = Scheduler(graphs.grid)
        self._parameters = parameters
        self._state = state
        self._host = host
        self._padded_vocab, self._structures = padded_vocab, structures
        self._clock = clock
        self._in_flight: _InFlight | None = None
        self._requests: dict[int, AdmittedRequest] = {}
        self._sampling: dict[int, SamplingState] = {}
        """Sampling parameters of each request, for its first sample."""
        self._in_slot: dict[int, ScheduledSequence] = {}
        self._scores = PromptScores()
        self._unclean: set[int] = set()
        """Slots whose cache may hold non-finite numbers."""
        self._unclean_prefixes: set[int] = set()
        """Groups whose prefix may hold non-finite numbers."""

    def submit(self, request: AdmittedRequest) -> None:
        """Queue a request.

        Raises:
          NoBucketFits: The request does not fit the grid.
        """
        self.scheduler.submit(request.scheduled)
        self._requests[request.scheduled.number] = request
        if (prefix := request.scheduled.planned_prefix) is not None and request.adapter is not None:
            self._prefix_adapters[prefix] = request.adapter
        # packed here, because requests are submitted while the device runs
        self._sampling[request.scheduled.number] = pack_sampling(
            request.request.params,
            ScheduledSequence(request.scheduled, sample=0),
            seed=request.seed,
            stop_ids=request.stop_ids,
            vocab_size=self._padded_vocab,
            structure=request.structure,
            adapter=request.adapter,
        )

    def forget(self, number: int) -> None:
        """Drop the data of a request whose sequences have all ended."""
        del self._requests[number], self._sampling[number]

    def release(self, slot: int) -> None:
        """Free a slot whose sequence ended, on the device or at a stop string."""
        self.scheduler.slots.release(slot)
        del self._in_slot[slot]

    def abandon(self) -> None:
        """Drop all requests and start with an empty state; valid after an interrupted call too."""
        self.scheduler = Scheduler(self._graphs.grid)
        self._in_flight = None
        for container in (
            self._requests,
            self._sampling,
            self._in_slot,
            self._scores,
            self._unclean,
            self.prefix_ids,
            self._prefix_adapters,
            self._unclean_prefixes,
        ):
            container.clear()
        # an interrupted call may have donated the state without returning a new one
        for buffer in jax.tree.leaves(self._state):
            buffer.delete()
        self._state = self._graphs.empty_state()

    def dispatch(self) -> Action | None:
        """Start the next action; the previous one must have been received.

        Returns:
          The action; None if no work is left.

        Raises:
          GraphFailed: The graph of the action failed to start.
        """
        assert self._in_flight is None
        if (action := self.scheduler.next_action()) is None:
            return None
        start, key = self._clock(), _key_of(action)
        with naming_graph(key, self._graphs.grid, "failed as it ran"):
            match action:
                case PrefillAction():
                    output = self._prefill(action)
                case DecodeAction():
                    output = self._decode(action)
                case PrefixAction(prefix=None):
                    self._clear_prefix(action.group)
                    return action
                case PrefixAction():
                    output = self._prefill_prefix(action)
                case ForkAction():
                    self._fork(action)
                    self.metrics.count_fork(action.num_copied, self._clock() - start)
                    return action
        self._in_flight = _InFlight(action, key, output, start)
        return action

    def receive(self) -> CallResults | None:
        """Wait for the call in flight, and free the slots of sequences that ended.

        Returns:
          The results of the call; None if no call is in flight.

        Raises:
          GraphFailed: The call failed, or ran out of memory.
        """
        if (call := self._in_flight) is None:
            return None
        with naming_graph(call.key, self._graphs.grid, "failed as it ran"):
            output = self._host.fetch(self._results_to_fetch(call))
        self._in_flight = None
        seconds = self._clock() - call.start
        results = CallResults(call.action, output, dict(self._in_slot), seconds)
        match call.action:
            case PrefillAction(rows=rows):
                for row, is_clean in zip(rows, output.is_clean_B, strict=False):
                    self._note_contents(row, is_clean=bool(is_clean))
            case PrefixAction(group=group):
                if not output.is_clean_B[0]:
                    self._unclean_prefixes.add(group)
            case DecodeAction(slots=slots):
                self._note_lengths(slots, results)
        return results

    def events(self, results: CallResults) -> list[Event]:
        """The events of a call, which is added to the metrics: pass each call once, in order."""
        match results.action:
            case PrefillAction() as action:
                return self._events_of_prefill(action, results)
            case PrefixAction(count=count):
                self._count_prefix(count, results)
                return []
            case DecodeAction() as action:
                return self._events_of_decode(action, results)

    def _prefill(self, action: PrefillAction) -> PrefillOutput:
        grid, bucket, rows = self._graphs.grid, action.bucket, action.rows
        for row in rows:
            if row.start == 0 and row.slot is not None:
                self._clear(row.slot)
        requests = [self._requests[row.sequence.request.number] for row in rows]
        prompts = [request.own_token_ids for request in requests]
        prefix = None if grid.prefixes is None else action.group
        pieces, tokens_BT, next_BT = pack_pieces(rows, prompts, bucket, grid.decode_slots, prefix)
        slot_requests = pack_requests(
            [row.sequence.request for row in rows],
            [self._sampling_of(row.sequence) for row in rows],
            bucket.batch,
        )
        arguments = (pieces, slot_requests, tokens_BT)
        if action.is_scored:
            # -1 for dummy rows
            num_logprobs_B = np.full(bucket.batch, -1, np.int32)
            num_logprobs_B[: len(rows)] = [num_alternatives(x.request) for x in requests]
            arguments = (*arguments, next_BT, num_logprobs_B)
        return self._call(_key_of(action), *self._host.put(arguments))

    def _events_of_prefill(self, action: PrefillAction, results: CallResults) -> list[Event]:
        rows, output = action.rows, results.output
        events: list[Event] = []
        if action.is_scored:
            events += self._scores.add(rows, output.scores, self._requests)
        if output.experts is not None:
            self.metrics.experts["prefill"].add(output.experts.use)
            sequences = enumerate(row.sequence for row in rows)
            events += results.dropped(sequences, is_of_prompt=True)
        computed = action.bucket.batch * action.bucket.tokens
        self.metrics.count_prefill(
            action.bucket,
            PrefillUse(1, len(rows), action.num_tokens, computed, results.seconds),
            is_scored=action.is_scored,
            prefix_tokens=action.prefix_tokens,
            shared_tokens=action.shared_tokens,
        )
        return events

    def _prefill_prefix(self, action: PrefixAction) -> PrefillOutput:
        prefixes = self._graphs.grid.prefixes
        assert prefixes is not None and action.prefix is not None
        if action.start == 0 and action.group in self._unclean_prefixes:
            self._clear_prefix(action.group)
        ids = self.prefix_ids[action.prefix][action.start : action.start + action.count]
        adapter = self._prefix_adapters.get(action.prefix)
        packed = pack_prefix(action.group, action.start, ids, prefixes, adapter)
        return self._call(PREFIX, *self._host.put(packed))

    def _clear_prefix(self, group: int) -> None:
        self._call(CLEAR_PREFIX, self._host.put(np.int32(group)))
        self._unclean_prefixes.discard(group)

    def _count_prefix(self, num_tokens: int, results: CallResults) -> None:
        prefixes = self._graphs.grid.prefixes
        assert prefixes is not None
        if (experts := results.output.experts) is not None:
            self.metrics.experts["prefill"].add(experts.use)
        self.metrics.count_prefix(prefixes, num_tokens, seconds=results.seconds)

    def _note_contents(self, row: PromptPiece, *, is_clean: bool) -> None:
        """Record the contents of a slot after a piece was written to it, if the row has a slot."""
        if (slot := row.slot) is None:
            return
        if not is_clean:
            self._unclean.add(slot)
        if row.is_last and row.sequence.request.generates:
            self._in_slot[slot] = row.sequence

    def _clear(self, slot: int) -> None:
        """Overwrite a slot for its next owner if it holds non-finite numbers.

        The owner's attention would multiply them by zero, which gives NaN.
        """
        if slot in self._unclean:
            # a source beyond the last slot: a fork from there writes an empty slot
            self._copy(self._graphs.grid.decode_slots, slot, None)

    def _sampling_of(self, sequence: ScheduledSequence) -> SamplingState:
        sampling = self._sampling[sequence.request.number]
        return sampling._replace(sample_B=np.array([sequence.sample], np.int32))

    def _fork(self, action: ForkAction) -> None:
        self._copy(action.source, action.slot, action.sequence)
        if action.sequence is not None:
            self._in_slot[action.slot] = action.sequence
        if action.source in self._unclean:
            self._unclean.add(action.slot)

    def _copy(self, source: int, slot: int, sequence: ScheduledSequence | None) -> None:
        """Copy a slot, with the sampling parameters of a sequence if it has one."""
        sampling = greedy_sampling(self._padded_vocab, self._graphs.grid)
        if sequence is not None:
            sampling = self._sampling_of(sequence)
        self._call(FORK, *self._host.put((np.int32(source), np.int32(slot), sampling)))
        self._unclean.discard(slot)

    def _decode(self, action: DecodeAction) -> DecodeOutput:
        is_live_B = np.zeros(self._graphs.grid.decode_slots, bool)
        is_live_B[list(action.slots)] = True
        tables = () if self._structures is None else (self._structures,)
        return self._call(_key_of(action), self._host.put(is_live_B), *tables)

    def _call(self, key: GraphKey, *arguments: Any) -> Any:
        """Start a graph on the state, and return its output."""
        self._state, output = self._graphs.call(key, self._parameters, self._state, *arguments)
        return output

    def _results_to_fetch(self, call: _InFlight) -> PrefillOutput | DecodeOutput:
        """The results of a call to copy to the host.

        Log-probabilities of new tokens are included only if a request in a slot asks for them.
        """
        if not isinstance(call.action, DecodeAction):
            return call.output
        in_slots = (self._in_slot[slot].request.number for slot in call.action.slots)
        if any(self._requests[number].request.params.logprobs is not None for number in in_slots):
            return call.output
        return call.output._replace(scores=None)

    def _note_lengths(self, slots: tuple[int, ...], results: CallResults) -> None:
        """Record the new lengths after a decode call, and free the slots of ended sequences."""
        output, num_emitted = results.output, results.num_emitted_B.tolist()
        is_active, is_clean = output.is_active_B.tolist(), output.is_clean_B.tolist()
        self._unclean.update(slot for slot in slots if not is_clean[slot])
        for slot in slots:
            if is_active[slot]:
                self.scheduler.slots.advance(slot, num_emitted[slot])
            else:
                self.release(slot)

    def _events_of_decode(self, action: DecodeAction, results: CallResults) -> list[Event]:
        output = results.output
        events: list[Event] = []
        if output.experts is not None:
            self.metrics.experts["decode"].add(output.experts.use)
            events += results.dropped(results.sequences.items(), is_of_prompt=False)
        self.metrics.count_decode(
            action.span,
            # the device's loop ends early when no sequence emits any more
            steps=int(results.num_emitted_B.max()),
            emitted=int(results.num_emitted_B.sum()),
            live_slots=len(action.slots),
            slots=len(results.num_emitted_B),
            seconds=results.seconds,
        )
        for slot in action.slots:
            request = self._requests[results.sequences[slot].request.number].request
            events.append(results.emitted(slot, request.params.logprobs))
        return events


def _key_of(action: Action) -> GraphKey:
    """The graph that runs an action."""
    match action:
        case PrefillAction(bucket=bucket, is_scored=is_scored):
            return GraphKey("score" if is_scored else "prefill", bucket)
        case PrefixAction(prefix=prefix):
            return PREFIX if prefix else CLEAR_PREFIX
        case ForkAction():
            return FORK
        case DecodeAction(span=span):
            return GraphKey("decode", span)
