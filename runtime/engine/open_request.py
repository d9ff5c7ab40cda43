"""The state of a request between submission and return: its tokens and its text.

Does not know about the engine's calls or their order.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import RowError
from ..request import CompletionOutput, Request, SampleCounts, TokenLogprob
from ..text.detokenizer import TextCollector
from .admission import AdmittedRequest
from .sample_rules import RowSamples, SampleOutcome


@dataclass
class Continuation:
    """The text and the output so far of one sequence."""

    collector: TextCollector
    output: CompletionOutput

    def finish(self) -> CompletionOutput:
        """Complete the output with its text and cumulative log-probability."""
        output = self.output
        output.text = self.collector.finish()
        if output.logprobs is not None:
            output.cumulative_logprob = math.fsum(score.logprob for score in output.logprobs)
        return output

    def end(self, outcome: SampleOutcome, new_collector: Callable[[], TextCollector]) -> int:
        """End a sample as its row's rule says; return the number of tokens that are cut."""
        output = self.output
        num_cut = len(output.token_ids) - outcome.length
        del output.token_ids[outcome.length :]
        if output.logprobs is not None:
            del output.logprobs[outcome.length :]
        if self.collector.num_tokens_kept > outcome.length:
            self.collector = new_collector()
            self.collector.push(output.token_ids)
        output.answer, output.votes = outcome.answer, outcome.votes
        output.stopped_early = outcome.stopped_early
        if outcome.stopped_early is not None:
            output.finish_reason, output.stop_reason = "stop", None
        return num_cut


@dataclass
class OpenRequest:
    """A request that was submitted and not yet returned."""

    request: Request
    admitted: AdmittedRequest
    arrival: float
    continuations: list[Continuation]
    open_sequences: int
    new_collector: Callable[[], TextCollector]
    samples: RowSamples | None = None
    """The ends of the samples, if the request has a rule for them."""
    first_token: float | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    dropped_of_prompt: Counter[int] = field(default_factory=Counter)
    """Expert choices dropped in prefill, by the first sequence that shares the prefilled prompt."""
    error: RowError | None = None

    def ends_on_id(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token is a stop id of the request."""
        return bool(token_ids) and token_ids[-1] in self.admitted.stop_ids

    def read(
        self, sample: int, token_ids: Sequence[int], *, has_ended: bool, is_finite: bool = True
    ) -> None:
        """Add the tokens of a call to the text of a sequence.

        Args:
          sample: The index of the sequence.
          token_ids: The tokens.
          has_ended: Whether the device has ended the sequence after them.
          is_finite: Whether the logits for the next token were finite.
        """
        collector = self.continuations[sample].collector
        ends_on_id = has_ended and self.ends_on_id(token_ids)
        if self.samples is None:
            collector.push(token_ids, ends_with_stop_token=ends_on_id)
            return
        rest = list(token_ids)
        while not self.samples.has_ended(sample):
            size = self.samples.until_probe(sample)
            piece, rest = rest[:size], rest[size:]
            is_end = has_ended and not rest
            is_cut = collector.push(piece, ends_with_stop_token=is_end and ends_on_id)
            if is_end and not is_cut and not is_finite:
                self.samples.fail(sample, collector.num_tokens_kept)
                break
            self.samples.read(
                sample, collector.num_tokens_kept, collector.text, has_ended=is_end or is_cut
            )
            if not rest:
                break
        if collector.stop_reason is not None:
            collector.push(rest)

    def is_over(self, sample: int) -> bool:
        """Whether a stop string or the rule for samples has ended a sequence."""
        if self.samples is not None and self.samples.is_over(sample):
            return True
        return self.continuations[sample].collector.stop_reason is not None

    def end_samples(self) -> int:
        """End all samples as their rule says; return the number of tokens that are cut."""
        if self.samples is None:
            return 0
        outcomes = self.samples.outcomes()
        return sum(
            continuation.end(outcome, self.new_collector)
            for continuation, outcome in zip(self.continuations, outcomes, strict=True)
        )

    def outputs(self) -> list[CompletionOutput]:
        """The complete outputs of all sequences, or of those that the rule for samples keeps."""
        outputs = [continuation.finish() for continuation in self.continuations]
        if self.samples is None:
            return outputs
        means = [(o.cumulative_logprob or 0.0) / max(1, len(o.token_ids)) for o in outputs]
        if self.request.params.logprobs is None:
            for output in outputs:
                output.logprobs = None
        return [outputs[i] for i in self.samples.kept(self.samples.outcomes(), means)]

    def count_samples(self) -> SampleCounts | None:
        """Counts over all samples, after they ended; None without a rule."""
        if self.samples is None:
            return None
        scheduled = self.admitted.scheduled
        outputs = [continuation.output for continuation in self.continuations]
        stopped = [output for output in outputs if output.stopped_early is not None]
        limit = scheduled.max_total_length - scheduled.prompt_length
        return SampleCounts(
            total=len(outputs),
            stopped=len(stopped),
            output_tokens=sum(len(output.token_ids) for output in outputs),
            tokens_left=sum(limit - len(output.token_ids) for output in stopped),
        )

    def count_dropped(self) -> int:
        """Count the dropped expert choices; the prompt's count is added to every continuation.

        If the prompt was prefilled several times, because its sequences did not find slots
        together, the largest count of these prefills is used for all continuations.
        """
        of_prompt = max(self.dropped_of_prompt.values(), default=0)
        outputs = [continuation.output for continuation in self.continuations]
        total = of_prompt + sum(output.dropped_expert_choices for output in outputs)
        for output in outputs:
            output.dropped_expert_choices += of_prompt
        return total
