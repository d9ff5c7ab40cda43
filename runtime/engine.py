"""The engine: carries out the scheduler's actions on the device, in token ids.

Knows nothing of text, files or stop strings. What crosses to the host after a call is ids, flags,
counts of experts and, when asked for, log-probabilities. Guarantees: no compile (the graphs are
given), explicit transfers only, and a row that meets non-finite logits ends alone.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import jax
import numpy as np

from ..compile.bucket_grid import PrefillBucket
from ..compile.compiled_graphs import CompiledGraphs
from ..compile.steps import NO_TOKEN, DecodeOutput, DecodeState, Prompts
from ..modelzoo.moe.use import ExpertReport
from ..modelzoo.sampling import SamplingState, TokenScores
from .chunk_scheduler import ChunkAction, ChunkOfPrompt, ChunkScheduler, ForkAction, OpenAction
from .decode_slots import DecodeAction, Job, Sequence
from .host_arrays import HostArrays
from .metrics import EngineMetrics
from .padding import pack_chunks, pack_prompts, pack_sampling
from .request import Request, SamplingParams, TokenLogprob
from .scheduler import InsertAction, PrefillAction, Scheduler


@dataclass(frozen=True)
class EngineRequest:
    """A request as the engine takes it: admitted, with its seed and stop ids resolved."""

    job: Job
    request: Request
    seed: int
    stop_ids: tuple[int, ...]


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
    """Choices of experts that found a capacity full, in one call."""

    number: int
    sample: int
    """The sequence that lost them; of a prompt the first of those that share this reading."""
    is_of_prompt: bool
    count: int


Event = PromptScored | TokensEmitted | ChoicesDropped
Action = PrefillAction | InsertAction | OpenAction | ChunkAction | ForkAction | DecodeAction


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
        self.scheduler = (ChunkScheduler if graphs.grid.chunks else Scheduler)(graphs.grid)
        self.last_action: Action | None = None
        self._graphs = graphs
        self._parameters = parameters
        self._state = state
        self._host = host
        self._padded_vocab = padded_vocab
        self._clock = clock
        self._requests: dict[int, EngineRequest] = {}
        self._prompts: dict[int, tuple[PrefillBucket, Prompts]] = {}
        self._in_slot: dict[int, Sequence] = {}
        self._scores: dict[int, list[TokenLogprob]] = {}
        """Of prompts of which some chunks are scored."""

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

    def step(self) -> list[Event] | None:
        """Carry out the next action; None when nothing is left to do."""
        self.last_action = self.scheduler.next_action()
        match self.last_action:
            case PrefillAction() as action:
                return self._prefill(action)
            case InsertAction() as action:
                return self._insert(action)
            case OpenAction() as action:
                return self._open(action)
            case ChunkAction() as action:
                return self._chunk(action)
            case ForkAction() as action:
                return self._fork(action)
            case DecodeAction() as action:
                return self._decode(action)
            case None:
                return None

    def _prefill(self, action: PrefillAction) -> list[Event]:
        start = self._clock()
        requests = [self._requests[job.number] for job in action.jobs]
        prompts = [request.request.prompt_token_ids for request in requests]
        tokens_BT, true_length_B = pack_prompts(prompts, action.bucket)
        events: list[Event] = []
        if action.is_scored:
            arguments = (tokens_BT, true_length_B, _wanted(requests, action.bucket))
            arguments = self._host.put(arguments)
            made, scores = self._graphs.score(self._parameters, action.bucket, *arguments)
            host = self._host.fetch(scores)
            events += [
                PromptScored(
                    request.job.number,
                    _prompt_scores(request, host, row, 0, request.job.prompt_length),
                )
                for row, request in enumerate(requests)
            ]
        else:
            arguments = self._host.put((tokens_BT, true_length_B))
            made = self._graphs.prefill(self._parameters, action.bucket, *arguments)
        jax.block_until_ready(made.logits_BV)
        events += self._count_experts(
            made.experts, tokens_BT.size, ((job.number, 0) for job in action.jobs)
        )
        if any(job.generates for job in action.jobs):
            self._prompts[action.number] = (action.bucket, made)
        num_tokens = sum(map(len, prompts))
        self._count_prefill(action, len(prompts), num_tokens, tokens_BT.size, start)
        return events

    def _count_experts(
        self, made: ExpertReport | None, num_tokens: int, rows: Iterable[tuple[int, int]]
    ) -> list[Event]:
        """Count what a call of prompts made of its experts; `rows` are requests and samples."""
        report = self._host.fetch(made)
        if report is None:
            return []
        self.metrics.experts["prefill"].add(report.use, num_tokens)
        return _dropped(report, enumerate(rows), is_of_prompt=True)

    def _count_prefill(
        self,
        action: PrefillAction | ChunkAction,
        num_rows: int,
        real_tokens: int,
        computed_tokens: int,
        start: float,
    ) -> None:
        self.metrics.count_prefill(
            action.bucket,
            is_scored=action.is_scored,
            rows=num_rows,
            real_tokens=real_tokens,
            computed_tokens=computed_tokens,
            seconds=self._clock() - start,
        )

    def _insert(self, action: InsertAction) -> list[Event]:
        start = self._clock()
        limit_1 = np.array([action.sequence.job.limit], np.int32)
        row, slot = np.int32(action.row), np.int32(action.slot)
        arguments = self._host.put((row, slot, limit_1, self._sampling(action.sequence)))
        bucket, prompts = self._prompts[action.prefill]
        self._state = self._graphs.insert(self._state, bucket, prompts, *arguments)
        self._in_slot[action.slot] = action.sequence
        if action.is_last_of_prefill:
            del self._prompts[action.prefill]
        return self._inserted(start)

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

    def _inserted(self, start: float) -> list[Event]:
        self.metrics.count_insert(self._clock() - start)
        return []

    def _open(self, action: OpenAction) -> list[Event]:
        start = self._clock()
        job = action.sequence.job
        lengths = (np.array([length], np.int32) for length in (job.prompt_length, job.limit))
        arguments = (np.int32(action.slot), *lengths, self._sampling(action.sequence))
        self._state = self._graphs.open(self._state, *self._host.put(arguments))
        return self._inserted(start)

    def _fork(self, action: ForkAction) -> list[Event]:
        start = self._clock()
        source, slot = np.int32(action.source), np.int32(action.slot)
        arguments = self._host.put((source, slot, self._sampling(action.sequence)))
        self._state = self._graphs.fork(self._state, *arguments)
        self._in_slot[action.slot] = action.sequence
        return self._inserted(start)

    def _chunk(self, action: ChunkAction) -> list[Event]:
        start, num_slots = self._clock(), self._graphs.grid.decode_slots
        requests = [self._requests[row.sequence.job.number] for row in action.rows]
        prompts = [request.request.prompt_token_ids for request in requests]
        rows, tokens_BT, next_BT = pack_chunks(action.rows, prompts, action.bucket, num_slots)
        call = (self._parameters, self._state, action.bucket)
        events: list[Event] = []
        if action.is_scored:
            arguments = self._host.put((rows, tokens_BT, next_BT, _wanted(requests, action.bucket)))
            self._state, (experts, scores) = self._graphs.chunk_score(*call, *arguments)
            events += self._scored(action.rows, self._host.fetch(scores))
        else:
            arguments = self._host.put((rows, tokens_BT))
            self._state, experts = self._graphs.chunk(*call, *arguments)
        jax.block_until_ready(self._state.logits_BV)
        sequences = (row.sequence for row in action.rows)
        samples = ((sequence.job.number, sequence.sample) for sequence in sequences)
        events += self._count_experts(experts, tokens_BT.size, samples)
        for row in action.rows:
            if row.is_last and row.sequence.job.generates:
                self._in_slot[row.slot] = row.sequence
        num_tokens = sum(row.count for row in action.rows)
        self._count_prefill(action, len(action.rows), num_tokens, tokens_BT.size, start)
        return events

    def _scored(self, rows: Iterable[ChunkOfPrompt], scores: TokenScores) -> list[Event]:
        """Keep what chunks scored; an event for each prompt that is whole."""
        events: list[Event] = []
        for i, row in enumerate(rows):
            number = row.sequence.job.number
            known = self._scores.setdefault(number, [])
            of_row = _prompt_scores(self._requests[number], scores, i, row.start, row.count)
            known += of_row
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
            self.metrics.experts["decode"].add(output.experts.use, len(emitted_BQ), num_steps)


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
