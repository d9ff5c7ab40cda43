"""From requests to outputs: admission, the engine's events collected into text, finished requests.

While the device runs a call, the text of the one before it is made: in each turn `receive` does
what decides the next call (which rows ended, and for that alone the text of rows with stop
strings), `dispatch` starts that call, and `collect` does all the rest.

Knows nothing of files or command lines; `LLM` and the batch job are both built on it. Guarantees: a
request that fits no bucket is refused by name and never truncated; every submitted request is
returned exactly once.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...compile.grids.bucket_grid import BucketGrid, NoBucketFits, NoDecodeSlots
from ...compile.monitor import compile_monitor
from ...compile.signatures import MAX_STOP_IDS
from ..console import plural
from ..errors import RowError, check_process
from ..request import CompletionOutput, Request, RequestMetrics, RequestOutput
from ..text.collector import TextCollector
from ..text.tokenizer import Tokenizer
from .call_results import CallResults, ChoicesDropped, Event, PromptScored, TokensEmitted
from .decode_slots import DecodeAction, ScheduledRequest
from .engine import AdmittedRequest, Engine
from .expert_use import ExpertSetup
from .open_request import Continuation, OpenRequest
from .padding import row_seed
from .scheduler import Action


@dataclass
class GenerationSession:
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
    _open: dict[int, OpenRequest] = field(default_factory=dict)
    _num_submitted: int = 0
    _with_stops: set[int] = field(default_factory=set)
    """Requests whose text may end them."""
    _received: list[tuple[CallResults, float]] = field(default_factory=list)
    """Calls that were received and not yet collected, each with the time of its end."""

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
        scheduled = ScheduledRequest(
            number=self._num_submitted,
            prompt_length=prompt_length,
            max_total_length=self.grid.max_total_length(prompt_length, params.max_tokens),
            num_sequences=params.n,
            is_scored=params.prompt_logprobs is not None,
        )
        seed = row_seed(params, self.run_seed, request.request_id)
        entry = AdmittedRequest(scheduled, request, seed, stop_ids)
        continuations = [
            Continuation(TextCollector(self.tokenizer, params), CompletionOutput(i, "", [], None))
            for i in range(params.n)
        ]
        if params.logprobs is not None:
            for continuation in continuations:
                continuation.output.logprobs = []
        open_sequences = params.n if scheduled.max_total_length > prompt_length else 0
        self.engine.submit(entry)
        self._num_submitted += 1
        self._open[scheduled.number] = OpenRequest(
            request, entry, self.clock(), continuations, open_sequences
        )
        if continuations[0].collector.may_stop:
            self._with_stops.add(scheduled.number)

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

    def receive(self) -> bytes:
        """Wait for the call in flight and free the slots of rows that ended.

        Returns:
          The ids that the call emitted, which are the same on all processes of a pod.
        """
        if (results := self.engine.receive()) is None:
            return b""
        self._received.append((results, self.clock()))
        if not isinstance(results.action, DecodeAction):
            return b""
        if self._with_stops:
            self._end_at_stops(results.action.slots, results)
        return results.output.tokens_BQ.tobytes()

    def dispatch(self) -> Action | None:
        """Start the next action, once the last was received; None when nothing is left to do."""
        check_process()
        return self.engine.dispatch()

    def collect(self) -> list[RequestOutput]:
        """The requests that ended in the calls received since the last time, with their text."""
        touched = {
            self._collect(event, now): now
            for results, now in self._received
            for event in self.engine.events(results)
        }
        self._received.clear()
        return [self._finish(number, now) for number, now in touched.items() if self._done(number)]

    def step(self) -> list[RequestOutput]:
        """Start one action after the last has ended; the requests that ended in the last."""
        self.receive()
        action = self.dispatch()
        finished = self.collect()
        assert action or not self._open, f"{len(self._open)} requests have no work left"
        return finished

    def run(self) -> list[RequestOutput]:
        """Step until every submitted request has been returned."""
        outputs = []
        while self._open:
            outputs += self.step()
        return outputs

    def drain(self) -> list[str]:
        """Drop what has no slot yet; the ids of the requests that will not be returned."""
        dropped = self.engine.scheduler.drain()
        return [self._close(request.number).request.request_id for request in dropped]

    def abandon(self) -> None:
        """Drop every request, also after a step that was interrupted in its middle."""
        self._open.clear()
        self._received.clear()
        self._with_stops.clear()
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

    def _end_at_stops(self, slots: Sequence[int], results: CallResults) -> None:
        """Read the text of rows with stop strings, and free the slots of those that it ends."""
        for slot in slots:
            sequence = results.sequences[slot]
            if sequence.request.number not in self._with_stops:
                continue
            entry, has_ended = self._open[sequence.request.number], results.has_ended(slot)
            is_cut = entry.read(sequence.sample, results.ids_of(slot), has_ended=has_ended)
            if is_cut and not has_ended:
                self.engine.release(slot)

    def _grow(self, entry: OpenRequest, event: TokensEmitted, now: float) -> None:
        """Add a sequence's new tokens, and end it where it ends."""
        continuation = entry.continuations[event.sample]
        output, collector = continuation.output, continuation.collector
        if entry.first_token is None and event.token_ids:
            entry.first_token = now
        output.token_ids += event.token_ids
        if output.logprobs is not None:
            output.logprobs += event.scores
        if not collector.may_stop:
            entry.read(event.sample, event.token_ids, has_ended=event.is_finished)
        is_cut = collector.stop_reason is not None
        if not event.is_finite:
            entry.error = _nonfinite(entry.request)
        if is_cut:
            self.engine.metrics.cut_tokens += collector.num_tokens_past_stop
            del output.token_ids[collector.num_tokens_kept :]
            if output.logprobs is not None:
                del output.logprobs[collector.num_tokens_kept :]
            output.finish_reason, output.stop_reason = "stop", collector.stop_reason
        elif event.is_finished and entry.ends_on_id(event.token_ids):
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
        num_dropped = entry.count_dropped()
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
            output.outputs = [continuation.finish() for continuation in entry.continuations]
        return output

    def _close(self, number: int) -> OpenRequest:
        self.engine.forget(number)
        self._with_stops.discard(number)
        return self._open.pop(number)


def _overflow(request: Request, num_dropped: int) -> RowError:
    return RowError(
        "expert_overflow",
        f"request {request.request_id!r}: lost {plural(num_dropped, 'choice')} of "
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
