"""From requests to outputs: admission, the engine's events collected into text, finished requests.

Knows nothing of files or command lines; `LLM` and the batch job are both built on it. Guarantees: a
request that fits no bucket is refused by name and never truncated; every submitted request is
returned exactly once.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..compile.bucket_grid import BucketGrid, NoBucketFits, NoDecodeSlots
from ..compile.monitor import compile_monitor
from ..compile.signatures import MAX_STOP_IDS
from .counted import counted
from .decode_slots import Job
from .engine import ChoicesDropped, Engine, EngineRequest, Event, PromptScored, TokensEmitted
from .errors import check_process
from .expert_use import ExpertSetup
from .padding import row_seed
from .request import (
    CompletionOutput,
    Request,
    RequestMetrics,
    RequestOutput,
    RowError,
    TokenLogprob,
)
from .text.collector import TextCollector
from .text.tokenizer import Tokenizer


@dataclass
class _Continuation:
    """One sequence as it grows."""

    collector: TextCollector
    output: CompletionOutput


@dataclass
class _InProgress:
    """One request between submission and return."""

    request: Request
    engine_request: EngineRequest
    arrival: float
    continuations: list[_Continuation]
    open_sequences: int
    first_token: float | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    dropped_of_prompt: Counter[int] = field(default_factory=Counter)
    """Choices of experts, by the first sequence of those that share a reading of the prompt."""
    error: RowError | None = None


@dataclass
class Generator:
    """Feeds an engine with requests and gives back outputs as they finish."""

    engine: Engine
    grid: BucketGrid
    vocab_size: int
    max_position: int
    """The number of positions of the model; no plan can make a row longer."""
    eos_ids: tuple[int, ...]
    tokenizer: Tokenizer | None = None
    run_seed: int = 0
    experts: ExpertSetup | None = None
    """Of a model with experts."""
    attention: Mapping[str, str] = field(default_factory=dict)
    """The kernel of each phase, and why it was chosen."""
    clock: Callable[[], float] = time.monotonic
    _open: dict[int, _InProgress] = field(default_factory=dict)
    _num_submitted: int = 0

    def __post_init__(self):
        self._compiles_at_start = compile_monitor().num_compiles

    @property
    def unfinished(self) -> int:
        """Requests submitted and not returned yet."""
        return len(self._open)

    @property
    def wants_more(self) -> bool:
        """Whether another request should be submitted before the next step."""
        return self.engine.scheduler.wants_more

    @property
    def padding_waste(self) -> float | None:
        """Share of the tokens computed so far that are not real; None before the first."""
        return self.engine.metrics.padding_waste

    def submit(self, request: Request) -> None:
        """Admit a request or raise a `RowError` that says what does not fit."""
        check_process()
        params = request.params
        stop_ids = self.check(request)
        prompt_length = len(request.prompt_token_ids)
        job = Job(
            number=self._num_submitted,
            prompt_length=prompt_length,
            limit=self.grid.limit(prompt_length, params.max_tokens),
            num_sequences=params.n,
            is_scored=params.prompt_logprobs is not None,
        )
        seed = row_seed(params, self.run_seed, request.request_id)
        entry = EngineRequest(job, request, seed, stop_ids)
        continuations = [
            _Continuation(
                TextCollector(self.tokenizer, params),
                CompletionOutput(index, "", [], None, logprobs=_empty_if(params.logprobs)),
            )
            for index in range(params.n)
        ]
        open_sequences = params.n if job.limit > prompt_length else 0
        self.engine.submit(entry)
        self._num_submitted += 1
        self._open[job.number] = _InProgress(
            request, entry, self.clock(), continuations, open_sequences
        )

    def check(self, request: Request) -> tuple[int, ...]:
        """Refuse what the plan or the vocabulary cannot serve; the ids that end the row."""
        params, prompt = request.params, request.prompt_token_ids
        if len(prompt) == 0:
            raise RowError(
                "empty_prompt", "prompt: expected at least one token, got none.", "prompt"
            )
        self._check_ids("prompt", prompt)
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", tuple(params.logit_bias or ()))
        TextCollector(self.tokenizer, params)  # refuses stop strings where there is no text
        self._check_length(request)
        if params.prompt_logprobs is not None and not self.grid.score:
            raise RowError(
                "invalid_request",
                "prompt_logprobs: this plan has no score graphs; set buckets.score = true "
                "and build again.",
                "prompt_logprobs",
            )
        own = () if params.ignore_eos else self.eos_ids
        stop_ids = tuple(dict.fromkeys((*own, *params.stop_token_ids)))
        if len(stop_ids) > MAX_STOP_IDS:
            raise RowError(
                "invalid_request",
                f"stop_token_ids: expected at most {MAX_STOP_IDS - len(own)} ids beside the "
                f"model's own, got {len(params.stop_token_ids)}.",
                "stop_token_ids",
            )
        if params.min_tokens and len(stop_ids) >= self.vocab_size:
            raise RowError(
                "invalid_request",
                f"stop_token_ids: expected fewer than the vocabulary's {self.vocab_size} beside "
                f"min_tokens, which forbids all of them, got {len(stop_ids)}.",
                "stop_token_ids",
            )
        return stop_ids

    def step(self) -> list[RequestOutput]:
        """Carry out one action; the requests that it finished."""
        check_process()
        events = self.engine.step()
        if events is None:
            assert not self._open, f"{len(self._open)} requests have no work left"
            return []
        now = self.clock()
        touched = [self._collect(event, now) for event in events]
        return [
            self._finish(number, now) for number in dict.fromkeys(touched) if self._done(number)
        ]

    def run(self) -> list[RequestOutput]:
        """Step until every submitted request has been returned."""
        outputs = []
        while self._open:
            outputs += self.step()
        return outputs

    def drain(self) -> list[str]:
        """Drop what has no slot yet; the ids of the requests that will not be returned."""
        dropped = self.engine.scheduler.drain()
        return [self._close(job.number).request.request_id for job in dropped]

    def abandon(self) -> None:
        """Drop every request, also after a step that was interrupted in its middle."""
        self._open.clear()
        self.engine.abandon()

    def statistics(self) -> dict[str, Any]:
        """Counters of the run so far, ready for JSON."""
        metrics, experts = self.engine.metrics, self.experts
        return {
            **metrics.report(),
            "attention": dict(self.attention),
            **({} if experts is None else {"experts": experts.report(metrics.experts)}),
            "compiles_during_run": compile_monitor().num_compiles - self._compiles_at_start,
        }

    @property
    def _refuses_drops(self) -> bool:
        return self.experts is not None and self.experts.plan.overflow == "error"

    def _check_length(self, request: Request) -> None:
        """Refuse a row that is too long for the model, or else for the plan."""
        params, length = request.params, len(request.prompt_token_ids)
        # without max_tokens a row takes what is left, which min_tokens must fit in
        least = params.min_tokens or None if params.max_tokens is None else params.max_tokens
        output = 1 if least is None else least
        try:
            if length + output > self.max_position:
                raise NoBucketFits(
                    f"a prompt of length {length} and an output of {output} need "
                    f"{length + output} positions; the model has {self.max_position}. Lower "
                    f"max_tokens, or shorten the prompt."
                )
            self.grid.fit(length, least)
        except NoDecodeSlots as error:
            message = f"request {request.request_id!r}: {error}"
            raise RowError("invalid_request", message, "max_tokens") from None
        except NoBucketFits as error:
            message = f"request {request.request_id!r}: {error}"
            raise RowError("context_length_exceeded", message, "prompt") from None

    def _check_ids(self, name: str, ids: Sequence[int]) -> None:
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise RowError(
                    "invalid_token_id",
                    f"{name}: expected ids from 0 to {self.vocab_size - 1}, got {token}.",
                    name,
                )

    def _collect(self, event: Event, now: float) -> int:
        entry = self._open[event.number]
        match event:
            case PromptScored():
                entry.prompt_logprobs = [None, *event.scores]
                if not all(math.isfinite(s.logprob) for s in event.scores):
                    entry.error = _nonfinite(entry.request)
            case TokensEmitted():
                self._grow(entry, event, now)
            case ChoicesDropped():
                if event.is_of_prompt:
                    entry.dropped_of_prompt[event.sample] += event.count
                else:
                    output = entry.continuations[event.sample].output
                    output.dropped_expert_choices += event.count
        return event.number

    def _grow(self, entry: _InProgress, event: TokensEmitted, now: float) -> None:
        """Add a sequence's new tokens to its text, and end it where it ends."""
        continuation = entry.continuations[event.sample]
        output, collector = continuation.output, continuation.collector
        if entry.first_token is None and event.token_ids:
            entry.first_token = now
        ends_on_id = (
            event.is_finished
            and bool(event.token_ids)
            and event.token_ids[-1] in entry.engine_request.stop_ids
        )
        output.token_ids += event.token_ids
        if output.logprobs is not None:
            output.logprobs += event.scores
        is_cut = collector.push(event.token_ids, ends_with_stop_token=ends_on_id)
        if not event.is_finite:
            entry.error = _nonfinite(entry.request)
        if is_cut:
            self.engine.metrics.cut_tokens += collector.num_tokens_past_stop
            del output.token_ids[collector.num_tokens_kept :]
            if output.logprobs is not None:
                del output.logprobs[collector.num_tokens_kept :]
            output.finish_reason, output.stop_reason = "stop", collector.stop_reason
            if not event.is_finished:
                self.engine.cancel(event.number, event.sample)
        elif event.is_finished and ends_on_id:
            last = event.token_ids[-1]
            is_own = last not in entry.request.params.stop_token_ids
            output.finish_reason, output.stop_reason = "stop", None if is_own else last
        elif event.is_finished:
            output.finish_reason = "length"
        if is_cut or event.is_finished:
            entry.open_sequences -= 1

    def _done(self, number: int) -> bool:
        entry = self._open[number]
        is_scored = entry.request.params.prompt_logprobs is not None
        return entry.open_sequences == 0 and (entry.prompt_logprobs is not None or not is_scored)

    def _finish(self, number: int, now: float) -> RequestOutput:
        entry = self._close(number)
        num_dropped = _count_dropped(entry)
        if num_dropped and self._refuses_drops and entry.error is None:
            entry.error = _overflow(entry.request, num_dropped)
        output = RequestOutput(
            entry.request.request_id,
            entry.request.prompt,
            list(entry.request.prompt_token_ids),
            error=entry.error,
            metrics=RequestMetrics(entry.arrival, entry.first_token, now),
            dropped_expert_choices=num_dropped,
        )
        if entry.error is None:
            output.prompt_logprobs = entry.prompt_logprobs
            output.outputs = [_completed(continuation) for continuation in entry.continuations]
        return output

    def _close(self, number: int) -> _InProgress:
        self.engine.forget(number)
        return self._open.pop(number)


def _completed(continuation: _Continuation) -> CompletionOutput:
    output = continuation.output
    output.text = continuation.collector.finish()
    if output.logprobs is not None:
        output.cumulative_logprob = math.fsum(score.logprob for score in output.logprobs)
    return output


def _empty_if(num_logprobs: int | None) -> list[TokenLogprob] | None:
    return None if num_logprobs is None else []


def _count_dropped(entry: _InProgress) -> int:
    """Choices that a request lost; its continuations get those of the prompt, too.

    Where a prompt was read more than once, as its sequences found no slots together, the reading
    that lost most counts for all.
    """
    of_prompt = max(entry.dropped_of_prompt.values(), default=0)
    outputs = [continuation.output for continuation in entry.continuations]
    total = of_prompt + sum(output.dropped_expert_choices for output in outputs)
    for output in outputs:
        output.dropped_expert_choices += of_prompt
    return total


def _overflow(request: Request, num_dropped: int) -> RowError:
    return RowError(
        "expert_overflow",
        f"request {request.request_id!r}: lost {counted(num_dropped, 'choice')} of "
        f"experts, as the capacity that the plan gives these was full. Raise capacity_factor in "
        f'the plan\'s [experts.prefill] or [experts.decode], or say dispatch = "lossless" there; '
        f'with overflow = "drop" in [experts] such rows are answered, with the number.',
    )


def _nonfinite(request: Request) -> RowError:
    return RowError(
        "nonfinite_logits",
        f"request {request.request_id!r}: the model gave NaN or infinite logits. Other rows are "
        f"not affected. Use --dtype float32; if that does no better, the weights are at fault.",
    )
