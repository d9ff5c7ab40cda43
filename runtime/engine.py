"""The engine: carries out the scheduler's actions on the device, in token ids.

Knows nothing of text, files or stop strings. What crosses to the host after a call is ids, flags,
counts of experts and, when asked for, log-probabilities. Guarantees: no compile (the graphs are
given), explicit transfers only, and a row that meets non-finite logits ends alone.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from ..compile.bucket_grid import PrefillBucket
from ..compile.compiled_graphs import CompiledGraphs
from ..compile.graph_failures import naming_graph
from ..compile.steps import NO_TOKEN, DecodeOutput, DecodeState
from ..modelzoo.moe.use import ExpertReport
from ..modelzoo.sampling import SamplingState, TokenScores
from .decode_slots import DecodeAction, Job, Sequence
from .host_arrays import HostArrays
from .metrics import EngineMetrics
from .padding import greedy_sampling, pack_pieces, pack_requests, pack_sampling
from .request import Request, SamplingParams, TokenLogprob
from .scheduler import Action, ForkAction, PrefillAction, PromptPiece, Scheduler


@dataclass(frozen=True)
class PromptScored:
    """The log-probabilities of a request's prompt tokens, from the second on."""

    number: int
    scores: list[TokenLogprob]


@dataclass(frozen=True)
class TokensEmitted:
    """New ids of one sequence, and whether and how it ended."""

    number: int
    sample: int
    token_ids: list[int]
    scores: list[TokenLogprob]
    is_finished: bool
    is_finite: bool


@dataclass(frozen=True)
class ChoicesDropped:
    """The number of choices of experts that one call dropped, as a capacity was full."""

    number: int
    sample: int
    """The sequence that lost them; for a prompt, the first of the sequences that share it."""
    is_of_prompt: bool
    count: int


Event = PromptScored | TokensEmitted | ChoicesDropped


@dataclass(frozen=True)
class EngineRequest:
    """A request as the engine takes it: admitted, with its seed and stop ids resolved."""

    job: Job
    request: Request
    seed: int
    stop_ids: tuple[int, ...]


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
        self.last_action: Action | None = None
        self._graphs = graphs
        self.scheduler = Scheduler(graphs.grid)
        self._parameters = parameters
        self._state = state
        self._host = host
        self._padded_vocab = padded_vocab
        self._clock = clock
        self._requests: dict[int, EngineRequest] = {}
        self._in_slot: dict[int, Sequence] = {}
        self._scores: dict[int, list[TokenLogprob]] = {}
        """Log-probabilities of prompts of which some pieces are scored."""
        self._unclean: set[int] = set()
        """Slots that may hold numbers that are not finite."""

    def submit(self, request: EngineRequest) -> None:
        """Queue a request; it must fit the grid."""
        self.scheduler.submit(request.job)
        self._requests[request.job.number] = request

    def forget(self, number: int) -> None:
        """Drop what is kept for a request whose sequences have all ended."""
        del self._requests[number]

    def cancel(self, number: int, sample: int) -> None:
        """End one sequence that decodes, for a reason the device cannot see."""
        for slot, sequence in list(self._in_slot.items()):
            if sequence.job.number == number and sequence.sample == sample:
                self._release(slot)

    def abandon(self) -> None:
        """Drop all requests, also after a step that was interrupted."""
        self.scheduler = Scheduler(self._graphs.grid)
        for kept in (self._requests, self._in_slot, self._scores, self._unclean):
            kept.clear()
        # a call may have taken the state and not have given it back
        for array in jax.tree.leaves(self._state):
            array.delete()
        self._state = self._graphs.empty_state()

    def step(self) -> list[Event] | None:
        """Carry out the next action; None when nothing is left to do.

        Raises:
          GraphFailed: The device refuses the action's graph, or ran out of memory in it.
        """
        action = self.last_action = self.scheduler.next_action()
        if action is None:
            return None
        name, carry_out = self._graph_of(action)
        with naming_graph(name, self._graphs.grid, "failed as it ran"):
            return carry_out()

    def _graph_of(self, action: Action) -> tuple[str, Callable[[], list[Event]]]:
        """The graph that carries an action out, and the call that runs it."""
        match action:
            case PrefillAction(bucket=bucket, is_scored=is_scored):
                name = CompiledGraphs.prefill_name(bucket, is_scored)
                return name, partial(self._prefill, action)
            case ForkAction():
                return CompiledGraphs.FORK, partial(self._fork, action)
            case DecodeAction(span=span):
                return CompiledGraphs.decode_name(span), partial(self._decode, action)

    def _prefill(self, action: PrefillAction) -> list[Event]:
        start, grid = self._clock(), self._graphs.grid
        bucket, rows = action.bucket, action.rows
        requests = [self._requests[row.sequence.job.number] for row in rows]
        prompts = [request.request.prompt_token_ids for request in requests]
        pieces, tokens_BT, next_BT = pack_pieces(rows, prompts, bucket, grid.decode_slots)
        asked = pack_requests(
            [row.sequence.job for row in rows],
            [self._sampling(row.sequence) for row in rows],
            bucket.batch,
        )
        arguments = (pieces, asked, tokens_BT)
        run = self._graphs.prefill
        if action.is_scored:
            arguments, run = (*arguments, next_BT, _wanted(requests, bucket)), self._graphs.score
        arguments = self._host.put(arguments)
        self._state, output = run(self._parameters, self._state, bucket, *arguments)
        host = self._host.fetch(output)
        events = self._scored(rows, host.scores) if action.is_scored else []
        sequences = (row.sequence for row in rows)
        samples = ((sequence.job.number, sequence.sample) for sequence in sequences)
        events += self._count_experts(host.experts, samples)
        for row, is_clean in zip(rows, host.is_clean_B, strict=False):
            self._note_contents(row, is_clean=bool(is_clean))
        self.metrics.count_prefill(
            bucket,
            is_scored=action.is_scored,
            rows=len(rows),
            real_tokens=sum(row.count for row in rows),
            computed_tokens=tokens_BT.size,
            seconds=self._clock() - start,
        )
        return events

    def _note_contents(self, row: PromptPiece, *, is_clean: bool) -> None:
        """Note what a piece left in its slot, if it has one."""
        if (slot := row.slot) is None:
            return
        if not is_clean:
            self._unclean.add(slot)
        if row.is_last and row.sequence.job.generates:
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

    def _count_experts(
        self, report: ExpertReport | None, rows: Iterable[tuple[int, int]]
    ) -> list[Event]:
        """Count what a call of prompts made of its experts; `rows` are requests and samples."""
        if report is None:
            return []
        self.metrics.experts["prefill"].add(report.use)
        return _dropped(report, enumerate(rows), is_of_prompt=True)

    def _sampling(self, sequence: Sequence) -> SamplingState:
        request = self._requests[sequence.job.number]
        return pack_sampling(
            request.request.params,
            seed=request.seed,
            sample=sequence.sample,
            prompt_length=sequence.job.prompt_length,
            stop_ids=request.stop_ids,
            vocab_size=self._padded_vocab,
        )

    def _fork(self, action: ForkAction) -> list[Event]:
        start = self._clock()
        source, slot = np.int32(action.source), np.int32(action.slot)
        arguments = self._host.put((source, slot, self._sampling(action.sequence)))
        self._state = self._graphs.fork(self._state, *arguments)
        self._in_slot[action.slot] = action.sequence
        if action.source in self._unclean:
            self._unclean.add(action.slot)
        self.metrics.count_fork(self._clock() - start)
        return []

    def _scored(self, rows: Iterable[PromptPiece], scores: TokenScores) -> list[Event]:
        """Keep what pieces scored; an event for each prompt that is complete."""
        events: list[Event] = []
        for i, row in enumerate(rows):
            number = row.sequence.job.number
            known = self._scores.setdefault(number, [])
            known += _prompt_scores(self._requests[number], scores, i, row.start, row.count)
            if row.is_last:
                events.append(PromptScored(number, self._scores.pop(number)))
        return events

    def _decode(self, action: DecodeAction) -> list[Event]:
        start = self._clock()
        is_live_B = np.zeros(self._graphs.grid.decode_slots, bool)
        is_live_B[list(action.slots)] = True
        self._state, output = self._graphs.decode(
            self._parameters, self._state, self._host.put(is_live_B), action.span
        )
        host = self._fetch(output, action.slots)
        events: list[Event] = []
        if host.experts is not None:
            live = ((slot, self._in_slot[slot]) for slot in action.slots)
            rows = ((slot, (sequence.job.number, sequence.sample)) for slot, sequence in live)
            events += _dropped(host.experts, rows, is_of_prompt=False)
        events += [self._emitted(host, slot) for slot in action.slots]
        self._count_decode(action, host, self._clock() - start)
        return events

    def _emitted(self, output: DecodeOutput, slot: int) -> TokensEmitted:
        sequence = self._in_slot[slot]
        row_Q = output.tokens_BQ[slot]
        steps = np.flatnonzero(row_Q != NO_TOKEN)
        params = self._requests[sequence.job.number].request.params
        scores = []
        if params.logprobs is not None:
            scores = [
                _token_logprob(output.scores, (slot, q), int(row_Q[q]), params.logprobs)
                for q in map(int, steps)
            ]
        is_finished = not output.is_active_B[slot]
        if not output.is_clean_B[slot]:
            self._unclean.add(slot)
        if is_finished:
            self._release(slot)
        else:
            self.scheduler.advance(slot, len(steps))
        return TokensEmitted(
            number=sequence.job.number,
            sample=sequence.sample,
            token_ids=row_Q[steps].tolist(),
            scores=scores,
            is_finished=is_finished,
            is_finite=bool(output.is_finite_B[slot]),
        )

    def _release(self, slot: int) -> None:
        self.scheduler.release(slot)
        del self._in_slot[slot]
        self._clear(slot)

    def _fetch(self, output: DecodeOutput, slots: tuple[int, ...]) -> DecodeOutput:
        """Ids and flags to the host; log-probabilities only when a row asked for them."""
        wanted = any(self._params_in(slot).logprobs is not None for slot in slots)
        return self._host.fetch(output if wanted else output._replace(scores=None))

    def _params_in(self, slot: int) -> SamplingParams:
        return self._requests[self._in_slot[slot].job.number].request.params

    def _count_decode(self, action: DecodeAction, output: DecodeOutput, seconds: float) -> None:
        emitted_BQ = output.tokens_BQ != NO_TOKEN
        # the loop ends early, so its steps are those in which any row emitted
        num_steps = int(emitted_BQ.any(axis=0).sum())
        self.metrics.count_decode(
            action.span,
            steps=num_steps,
            emitted=int(emitted_BQ.sum()),
            live_slots=len(action.slots),
            slots=len(emitted_BQ),
            seconds=seconds,
        )
        if output.experts is not None:
            self.metrics.experts["decode"].add(output.experts.use)


def _dropped(
    report: ExpertReport, rows: Iterable[tuple[int, tuple[int, int]]], *, is_of_prompt: bool
) -> list[Event]:
    """An event for each row of a call, with its request and sequence, that lost choices."""
    return [
        ChoicesDropped(number, sample, is_of_prompt, int(report.num_dropped_B[row]))
        for row, (number, sample) in rows
        if report.num_dropped_B[row]
    ]


def _num_prompt_logprobs(request: EngineRequest) -> int:
    wanted = request.request.params.prompt_logprobs
    return -1 if wanted is None else wanted


def _wanted(requests: Iterable[EngineRequest], bucket: PrefillBucket) -> np.ndarray:
    """`num_logprobs_B` of a scored call."""
    wanted_B = np.full(bucket.batch, -1, np.int32)
    for row, request in enumerate(requests):
        wanted_B[row] = _num_prompt_logprobs(request)
    return wanted_B


def _prompt_scores(
    request: EngineRequest, scores: TokenScores, row: int, start: int, count: int
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
