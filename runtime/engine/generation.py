"""Generates tokens: requests become text and finished outputs through the scheduler's actions.

The host makes the text of one call while the device runs the next. When a call ends, `read` finds
out which sequences ended, as the next call depends on it, and decodes text only for requests with
stop strings or a rule for their samples; `finish` does the remaining work.

Does not know about files or command lines.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..errors import RowError, check_process
from ..request import CompletionOutput, Request, RequestMetrics, RequestOutput
from ..text.detokenizer import TextCollector
from .actions import Action, DecodeAction
from .admission import Admission
from .call_results import CallResults, ChoicesDropped, Event, PromptScored, TokensEmitted
from .engine import Engine
from .metrics import RunFigures
from .model_runner import GraphCall
from .open_request import Continuation, OpenRequest
from .sample_rules import RowSamples
from .shared_prefixes import SharedPrefix
from .slot_calls import SlotCalls


@dataclass(kw_only=True)
class GenerationSession(Engine[Action, OpenRequest]):
    """Submits requests, and returns outputs as they finish.

    Attributes:
      slots: The requests in the slots, and the calls that serve them.
      admission: The limits of the plan and the model.
    """

    slots: SlotCalls
    admission: Admission
    _ended_by_text: set[int] = field(default_factory=set, init=False)
    """Numbers of the open requests whose text may end them: stop strings, a rule for samples."""

    def __post_init__(self):
        super().__post_init__()
        self.metrics.grid = self.admission.grid

    @property
    def wants_more(self) -> bool:
        """Whether another request should be submitted before the next step."""
        return self.slots.scheduler.wants_more

    @property
    def figures(self) -> RunFigures:
        """The figures of the run so far, for people."""
        return RunFigures(
            self.metrics.emitted_tokens,
            len(self.slots.scheduler.slots.live),
            self.admission.grid.decode_slots,
            self.metrics.padding_waste,
        )

    def reserve(self, num_slots: int) -> None:
        """Let shared prefixes hold up to this number of slots at one time."""
        self.slots.scheduler.reserve(num_slots)

    def submit(self, request: Request, prefix: SharedPrefix | None = None) -> None:
        """Admit and queue a request.

        Args:
          request: The request.
          prefix: The shared prefix with which its prompt begins. Requests with prefixes must be
            submitted in depth-first order (see `shared_prefixes`).

        Raises:
          RowError: The plan or the model cannot serve the request.
        """
        check_process()
        params = request.params
        admitted = self.admission.admit(request, self._num_submitted, prefix)
        scheduled = admitted.scheduled
        new_collector = partial(TextCollector, self.admission.tokenizer, params)
        continuations = [
            Continuation(new_collector(), CompletionOutput(i, "", [], None))
            for i in range(params.n)
        ]
        rule = params.stopping
        if admitted.request.params.logprobs is not None:
            for continuation in continuations:
                continuation.output.logprobs = []
        open_sequences = params.n if scheduled.generates else 0
        self.slots.submit(admitted)
        self._num_submitted += 1
        self._open[scheduled.number] = OpenRequest(
            request,
            admitted,
            self.clock(),
            continuations,
            open_sequences,
            new_collector,
            rule and RowSamples(rule, params.n, params.min_tokens),
        )
        if rule is not None or continuations[0].collector.may_stop:
            self._ended_by_text.add(scheduled.number)

    def check(self, request: Request) -> None:
        """Check a request against the plan and the vocabulary, without queueing it.

        Raises:
          RowError: The plan or the model cannot serve the request.
        """
        self.admission.admit(request, self._num_submitted)

    def next_action(self) -> Action | None:
        return self.slots.scheduler.next_action()

    def pack(self, action: Action) -> Sequence[GraphCall]:
        return self.slots.pack(action)

    def fetched(self, action: Action, output: Any) -> Any:
        return self.slots.fetched(action, output)

    def read(self, results: CallResults) -> bytes:
        """Free the slots of sequences that ended; return the ids that a decode call emitted."""
        self.slots.read(results)
        if not isinstance(results.action, DecodeAction):
            return b""
        if self._ended_by_text:
            self._end_by_text(results.action.slots, results)
        return results.output.tokens_BQ.tobytes()

    def finish(self, received: Sequence[CallResults]) -> list[RequestOutput]:
        """Count calls, read all of their results, and return the requests that ended."""
        touched = {
            self._collect(event, results.ended): results.ended
            for results in received
            for event in self.slots.events(results, self.metrics)
        }
        return [
            self._finish(number, now) for number, now in touched.items() if self._is_done(number)
        ]

    def drain(self) -> list[str]:
        """Drop requests that have no slot yet.

        Returns:
          The ids of the dropped requests, which will not be returned.
        """
        dropped = self.slots.scheduler.drain()
        return [self._close(request.number).request.request_id for request in dropped]

    def restarted(self, run_seed: int) -> "GenerationSession":
        """A session for the next rows, with a seed and counters of its own; no row may be open."""
        assert not self._open
        self.slots.scheduler.slots.forget_growth()
        return replace(self, admission=replace(self.admission, run_seed=run_seed))

    def abandon(self) -> None:
        """Drop every request; valid after an interrupted step too."""
        self._ended_by_text.clear()
        self.slots = self.slots.emptied()
        super().abandon()

    def _collect(self, event: Event, now: float) -> int:
        """Add an event to its request; return the number of the request."""
        entry = self._open[event.number]
        match event:
            case PromptScored():
                entry.prompt_logprobs = [None, *event.scores]
                if not all(math.isfinite(s.logprob) for s in event.scores):
                    entry.error = _nonfinite(entry.request)
            case TokensEmitted():
                self._add_tokens(entry, event, now)
            case ChoicesDropped():
                if event.is_of_prompt:
                    entry.dropped_of_prompt[event.sample] += event.count
                else:
                    output = entry.continuations[event.sample].output
                    output.dropped_expert_choices += event.count
        return event.number

    def _end_by_text(self, slots: Sequence[int], results: CallResults) -> None:
        """Decode text that may end its sequence or others; free the slots of ended sequences."""
        read: list[tuple[int, OpenRequest]] = []
        for slot in slots:
            sequence = results.sequences[slot]
            if sequence.request.number in self._ended_by_text:
                entry = self._open[sequence.request.number]
                if not results.is_known(slot):
                    entry.read(
                        sequence.sample,
                        results.ids_of(slot),
                        has_ended=results.has_ended(slot),
                        is_finite=bool(results.output.is_finite_B[slot]),
                    )
                read.append((slot, entry))
        # after all were read, because a sample that ends may end the other samples of its row
        for slot, entry in read:
            if entry.is_over(results.sequences[slot].sample) and not results.has_ended(slot):
                results.closed.add(slot)
                self.slots.release(slot)

    def _add_tokens(self, entry: OpenRequest, event: TokensEmitted, now: float) -> None:
        """Add the new tokens of a sequence, and set its finish reason if it ended."""
        continuation = entry.continuations[event.sample]
        output, collector = continuation.output, continuation.collector
        if entry.first_token is None and event.token_ids:
            entry.first_token = now
        output.token_ids += event.token_ids
        if output.logprobs is not None:
            output.logprobs += event.scores
        if event.number not in self._ended_by_text:
            entry.read(event.sample, event.token_ids, has_ended=event.is_finished)
        is_cut = collector.stop_reason is not None
        if not event.is_finite and entry.samples is None:
            entry.error = _nonfinite(entry.request)
        if is_cut:
            self.metrics.cut_tokens += collector.num_tokens_past_stop
            del output.token_ids[collector.num_tokens_kept :]
            if output.logprobs is not None:
                del output.logprobs[collector.num_tokens_kept :]
            output.finish_reason, output.stop_reason = "stop", collector.stop_reason
        elif event.is_finished and entry.ends_on_id(event.token_ids):
            last = event.token_ids[-1]
            is_own = last not in entry.request.params.stop_token_ids
            output.finish_reason, output.stop_reason = "stop", None if is_own else last
        elif event.is_finished:
            # an answer with a form is complete when it reaches its limit
            has_form = entry.request.params.structured_outputs is not None
            output.finish_reason = "stop" if has_form else "length"
        if event.is_finished or entry.is_over(event.sample):
            entry.open_sequences -= 1

    def _is_done(self, number: int) -> bool:
        entry = self._open[number]
        is_scored = entry.request.params.prompt_logprobs is not None
        return entry.open_sequences == 0 and (entry.prompt_logprobs is not None or not is_scored)

    def _finish(self, number: int, now: float) -> RequestOutput:
        entry = self._close(number)
        self.metrics.cut_tokens += entry.end_samples()
        if entry.samples is not None and entry.samples.has_failed:
            entry.error = _nonfinite(entry.request)
        num_dropped = entry.count_dropped()
        refuses_drops = self.experts is not None and self.experts.plan.overflow == "error"
        if num_dropped and refuses_drops and entry.error is None:
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
            output.outputs = entry.outputs()
            output.samples = entry.count_samples()
        return output

    def _close(self, number: int) -> OpenRequest:
        self.slots.forget(number)
        self._ended_by_text.discard(number)
        return self._open.pop(number)


def _overflow(request: Request, num_dropped: int) -> RowError:
    return RowError(
        "expert_overflow",
        f"request {request.request_id!r}: expected no dropped expert choices, got {num_dropped}, "
        f"because the experts' capacity was full. Raise capacity_factor in the plan's "
        f'[experts.prefill] or [experts.decode], or set dispatch = "lossless" there; with '
        f'overflow = "drop" in [experts] such rows get a result and the number of dropped choices.',
    )


def _nonfinite(request: Request) -> RowError:
    return RowError(
        "nonfinite_logits",
        f"request {request.request_id!r}: expected finite logits, got NaN or infinite "
        f"ones. Other rows are not affected. Use --dtype float32; if the error stays, the weights "
        f"are at fault.",
    )
