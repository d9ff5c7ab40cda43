"""The engine: carries out the scheduler's actions on the device, in token ids.

An action has three steps, so that the device need not wait for all that the host does: `dispatch`
starts its graph; `receive` waits for the end and frees the slots of rows that ended, which is all
that the next action depends on; `events` says what came of it while the next graph runs.

Knows nothing of text, files or stop strings. What crosses to the host after a call is ids, flags,
counts of experts and, when asked for, log-probabilities. Guarantees: no compile (the graphs are
given), explicit transfers only, and a row that meets non-finite logits ends alone.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from ...compile.compiled_graphs import CompiledGraphs
from ...compile.graph_failures import naming_graph
from ...compile.grids.bucket_grid import PrefillBucket
from ...compile.prefill_steps import PrefillOutput
from ...compile.steps import DecodeOutput, DecodeState
from ...modelzoo.moe.use import ExpertReport
from ...modelzoo.sampling import SamplingState, TokenScores
from ..devices.host_arrays import HostArrays
from ..request import Request, TokenLogprob
from .call_results import CallResults, ChoicesDropped, Event, PromptScored, TokensEmitted
from .decode_slots import DecodeAction, ScheduledRequest, ScheduledSequence
from .metrics import EngineMetrics
from .padding import greedy_sampling, pack_pieces, pack_requests, pack_sampling
from .scheduler import Action, ForkAction, PrefillAction, PromptPiece, Scheduler


@dataclass(frozen=True)
class AdmittedRequest:
    """A request as the engine takes it: admitted, with its seed and stop ids resolved."""

    scheduled: ScheduledRequest
    request: Request
    seed: int
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class _InFlight:
    """A call that was dispatched and not received."""

    action: PrefillAction | DecodeAction
    graph: str
    output: Any
    start: float


class Engine:
    """Slots on the device and the requests in them."""

    def __init__(
        self,
        graphs: CompiledGraphs,
        parameters: Mapping[str, jax.Array],
        state: DecodeState,
        host: HostArrays,
        padded_vocab: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.metrics = EngineMetrics()
        self._graphs = graphs
        self.scheduler = Scheduler(graphs.grid)
        self._parameters = parameters
        self._state = state
        self._host = host
        self._padded_vocab = padded_vocab
        self._clock = clock
        self._in_flight: _InFlight | None = None
        self._requests: dict[int, AdmittedRequest] = {}
        self._sampling: dict[int, SamplingState] = {}
        """Sampling parameters of the first sample of each request."""
        self._in_slot: dict[int, ScheduledSequence] = {}
        self._scores: dict[int, list[TokenLogprob]] = {}
        """Log-probabilities of prompts of which some pieces are scored."""
        self._unclean: set[int] = set()
        """Slots that may hold numbers that are not finite."""

    def submit(self, request: AdmittedRequest) -> None:
        """Queue a request; it must fit the grid."""
        self.scheduler.submit(request.scheduled)
        self._requests[request.scheduled.number] = request
        # here, as this is done while the device runs
        self._sampling[request.scheduled.number] = pack_sampling(
            request.request.params,
            seed=request.seed,
            sample=0,
            prompt_length=request.scheduled.prompt_length,
            stop_ids=request.stop_ids,
            vocab_size=self._padded_vocab,
        )

    def forget(self, number: int) -> None:
        """Drop what is kept for a request whose sequences have all ended."""
        del self._requests[number], self._sampling[number]

    def release(self, slot: int) -> None:
        """Free a slot whose row ended, on the device or for a reason that this cannot see."""
        self.scheduler.release(slot)
        del self._in_slot[slot]
        self._clear(slot)

    def abandon(self) -> None:
        """Drop all requests, also after a call that was interrupted."""
        self.scheduler = Scheduler(self._graphs.grid)
        self._in_flight = None
        for kept in (
            self._requests,
            self._sampling,
            self._in_slot,
            self._scores,
            self._unclean,
        ):
            kept.clear()
        # a call may have taken the state and not have given it back
        for array in jax.tree.leaves(self._state):
            array.delete()
        self._state = self._graphs.empty_state()

    def dispatch(self) -> Action | None:
        """Start the next action, once the last was received; None when nothing is left to do.

        Raises:
          GraphFailed: The device refuses the action's graph.
        """
        assert self._in_flight is None
        if (action := self.scheduler.next_action()) is None:
            return None
        start, graph = self._clock(), _graph_of(action)
        with naming_graph(graph, self._graphs.grid, "failed as it ran"):
            match action:
                case PrefillAction():
                    output = self._prefill(action)
                case DecodeAction():
                    output = self._decode(action)
                case ForkAction():
                    self._fork(action)
                    self.metrics.count_fork(self._clock() - start)
                    return action
        self._in_flight = _InFlight(action, graph, output, start)
        return action

    def receive(self) -> CallResults | None:
        """Wait for the call in flight, and free the slots of rows that ended; None without a call.

        Raises:
          GraphFailed: The call failed, or ran out of memory.
        """
        if (call := self._in_flight) is None:
            return None
        with naming_graph(call.graph, self._graphs.grid, "failed as it ran"):
            output = self._host.fetch(self._wanted_of(call))
        self._in_flight = None
        seconds = self._clock() - call.start
        results = CallResults(call.action, output, dict(self._in_slot), seconds)
        match call.action:
            case PrefillAction(rows=rows):
                for row, is_clean in zip(rows, output.is_clean_B, strict=False):
                    self._note_contents(row, is_clean=bool(is_clean))
            case DecodeAction(slots=slots):
                self._note_lengths(slots, results)
        return results

    def events(self, results: CallResults) -> list[Event]:
        """The events of a call, which is counted here: once for each call, in their order."""
        match results.action:
            case PrefillAction() as action:
                return self._events_of_prefill(action, results)
            case DecodeAction() as action:
                return self._events_of_decode(action, results)

    def _prefill(self, action: PrefillAction) -> PrefillOutput:
        grid, bucket, rows = self._graphs.grid, action.bucket, action.rows
        requests = [self._requests[row.sequence.request.number] for row in rows]
        prompts = [request.request.prompt_token_ids for request in requests]
        pieces, tokens_BT, next_BT = pack_pieces(rows, prompts, bucket, grid.decode_slots)
        asked = pack_requests(
            [row.sequence.request for row in rows],
            [self._sampling_of(row.sequence) for row in rows],
            bucket.batch,
        )
        arguments = (pieces, asked, tokens_BT)
        run = self._graphs.prefill
        if action.is_scored:
            arguments, run = (*arguments, next_BT, _wanted(requests, bucket)), self._graphs.score
        arguments = self._host.put(arguments)
        self._state, output = run(self._parameters, self._state, bucket, *arguments)
        return output

    def _events_of_prefill(self, action: PrefillAction, results: CallResults) -> list[Event]:
        rows, output = action.rows, results.output
        events = self._scored(rows, output.scores) if action.is_scored else []
        if output.experts is not None:
            self.metrics.experts["prefill"].add(output.experts.use)
            sequences = enumerate(row.sequence for row in rows)
            events += _dropped(output.experts, sequences, is_of_prompt=True)
        self.metrics.count_prefill(
            action.bucket,
            is_scored=action.is_scored,
            rows=len(rows),
            real_tokens=sum(row.count for row in rows),
            computed_tokens=action.bucket.batch * action.bucket.tokens,
            seconds=results.seconds,
        )
        return events

    def _note_contents(self, row: PromptPiece, *, is_clean: bool) -> None:
        """Note what a piece left in its slot, if it has one."""
        if (slot := row.slot) is None:
            return
        if not is_clean:
            self._unclean.add(slot)
        if row.is_last and row.sequence.request.generates:
            self._in_slot[slot] = row.sequence
        elif row.is_last:
            self._clear(slot)

    def _clear(self, slot: int) -> None:
        """Clear a slot that its owner left with numbers that are not finite.

        The attention of the next owner would multiply them, although by zero.
        """
        if slot not in self._unclean:
            return
        self._unclean.remove(slot)
        nowhere, slot_number = np.int32(self._graphs.grid.decode_slots), np.int32(slot)
        arguments = self._host.put((nowhere, slot_number, greedy_sampling(self._padded_vocab)))
        self._state = self._graphs.fork(self._state, *arguments)

    def _sampling_of(self, sequence: ScheduledSequence) -> SamplingState:
        sampling = self._sampling[sequence.request.number]
        return sampling._replace(sample_B=np.array([sequence.sample], np.int32))

    def _fork(self, action: ForkAction) -> None:
        source, slot = np.int32(action.source), np.int32(action.slot)
        arguments = self._host.put((source, slot, self._sampling_of(action.sequence)))
        self._state = self._graphs.fork(self._state, *arguments)
        self._in_slot[action.slot] = action.sequence
        if action.source in self._unclean:
            self._unclean.add(action.slot)

    def _scored(self, rows: Iterable[PromptPiece], scores: TokenScores) -> list[Event]:
        """Keep what pieces scored; an event for each prompt that is complete."""
        events: list[Event] = []
        for i, row in enumerate(rows):
            number = row.sequence.request.number
            known = self._scores.setdefault(number, [])
            known += _prompt_scores(self._requests[number], scores, i, row.start, row.count)
            if row.is_last:
                events.append(PromptScored(number, self._scores.pop(number)))
        return events

    def _decode(self, action: DecodeAction) -> DecodeOutput:
        is_live_B = np.zeros(self._graphs.grid.decode_slots, bool)
        is_live_B[list(action.slots)] = True
        self._state, output = self._graphs.decode(
            self._parameters, self._state, self._host.put(is_live_B), action.span
        )
        return output

    def _wanted_of(self, call: "_InFlight") -> PrefillOutput | DecodeOutput:
        """The results that are fetched: log-probabilities of new tokens only where a row asks."""
        if isinstance(call.action, PrefillAction):
            return call.output
        in_slots = (self._in_slot[slot].request.number for slot in call.action.slots)
        if any(self._requests[number].request.params.logprobs is not None for number in in_slots):
            return call.output
        return call.output._replace(scores=None)

    def _note_lengths(self, slots: tuple[int, ...], results: CallResults) -> None:
        """Note how long the rows of a decode call are, and free the slots of those that ended."""
        output, num_emitted = results.output, results.num_emitted_B.tolist()
        is_active, is_clean = output.is_active_B.tolist(), output.is_clean_B.tolist()
        self._unclean.update(slot for slot in slots if not is_clean[slot])
        for slot in slots:
            if is_active[slot]:
                self.scheduler.advance(slot, num_emitted[slot])
            else:
                self.release(slot)

    def _events_of_decode(self, action: DecodeAction, results: CallResults) -> list[Event]:
        output, events = results.output, []
        if output.experts is not None:
            self.metrics.experts["decode"].add(output.experts.use)
            events = _dropped(output.experts, results.sequences.items(), is_of_prompt=False)
        self.metrics.count_decode(
            action.span,
            # the loop ends early: as soon as no row emits
            steps=int(results.num_emitted_B.max()),
            emitted=int(results.num_emitted_B.sum()),
            live_slots=len(action.slots),
            slots=len(results.num_emitted_B),
            seconds=results.seconds,
        )
        return events + [self._emitted(results, slot) for slot in action.slots]

    def _emitted(self, results: CallResults, slot: int) -> TokensEmitted:
        sequence, token_ids = results.sequences[slot], results.ids_of(slot)
        params = self._requests[sequence.request.number].request.params
        scores = []
        if params.logprobs is not None:
            scores = [
                _token_logprob(results.output.scores, (slot, q), token_id, params.logprobs)
                for q, token_id in enumerate(token_ids)
            ]
        return TokensEmitted(
            number=sequence.request.number,
            sample=sequence.sample,
            token_ids=token_ids,
            scores=scores,
            is_finished=results.has_ended(slot),
            is_finite=bool(results.output.is_finite_B[slot]),
        )


def _graph_of(action: Action) -> str:
    """The name of the graph that carries an action out."""
    match action:
        case PrefillAction(bucket=bucket, is_scored=is_scored):
            return CompiledGraphs.prefill_name(bucket, is_scored)
        case ForkAction():
            return CompiledGraphs.FORK
        case DecodeAction(span=span):
            return CompiledGraphs.decode_name(span)


def _dropped(
    report: ExpertReport, rows: Iterable[tuple[int, ScheduledSequence]], *, is_of_prompt: bool
) -> list[Event]:
    """An event for each row of a call, given with its sequence, that lost choices."""
    return [
        ChoicesDropped(of.request.number, of.sample, is_of_prompt, int(report.num_dropped_B[row]))
        for row, of in rows
        if report.num_dropped_B[row]
    ]


def _num_prompt_logprobs(request: AdmittedRequest) -> int:
    wanted = request.request.params.prompt_logprobs
    return -1 if wanted is None else wanted


def _wanted(requests: Iterable[AdmittedRequest], bucket: PrefillBucket) -> np.ndarray:
    """`num_logprobs_B` of a scored call."""
    wanted_B = np.full(bucket.batch, -1, np.int32)
    for row, request in enumerate(requests):
        wanted_B[row] = _num_prompt_logprobs(request)
    return wanted_B


def _prompt_scores(
    request: AdmittedRequest, scores: TokenScores, row: int, start: int, count: int
) -> list[TokenLogprob]:
    """Of the prompt's tokens that follow `count` tokens from position `start` on."""
    ids, wanted = request.request.prompt_token_ids, _num_prompt_logprobs(request)
    return [
        _token_logprob(scores, (row, t), token_id, wanted)
        for t, token_id in enumerate(ids[start + 1 : start + count + 1])
    ]


def _token_logprob(
    scores: TokenScores, index: tuple[int, int], token_id: int, num_alternatives: int
) -> TokenLogprob:
    ids = scores.top_ids_BR[index][:num_alternatives]
    values = scores.top_logprobs_BR[index][:num_alternatives]
    top = tuple((int(i), float(v)) for i, v in zip(ids, values, strict=True))
    return TokenLogprob(token_id, float(scores.logprob_B[index]), top)
