"""Decides when the samples of one row end, from their texts and token counts alone.

The rule is defined as if all samples grew in step, one token each at a time. A sample ends where it
ends without a rule, or at an earlier probe that makes it certain. The row stops at the first token
count at which `stop_when` samples have ended with the same answer. The samples that have not ended
by then are stopped: they have as many tokens as this count, and no vote.

Samples really run at different times, so the count is known step by step. `limit` is the count for
the samples that have ended so far, and more samples can only lower it. A sample runs until it ends
or has `limit` tokens; its tokens beyond the last limit are cut. So each sample that would end
within the count runs to its end, and the outcome depends on the tokens of the samples alone, in
whatever order they run.

Does not know about tokens, slots or calls.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..request import SampleRule
from ..structured.answer_pattern import compile_answer, find_answer


@dataclass(frozen=True)
class SampleOutcome:
    """The end of one sample."""

    length: int
    """The number of its tokens."""
    answer: str | None
    votes: int
    """The number of samples that ended with this answer; 0 without an answer."""
    stopped_early: Literal["agreement", "certainty"] | None


@dataclass
class _Sample:
    """The part of a sample that was read."""

    length: int = 0
    has_ended: bool = False
    is_certain: bool = False
    has_failed: bool = False
    """Whether it ended because the token after its last one could not be computed."""
    answer: str | None = None
    """The answer with which it ended, or that of the last probe."""
    num_equal: int = 0
    """The number of successive probes, up to the last one, with this answer."""


class RowSamples:
    """The samples of one row.

    Attributes:
      limit: The token count at which the row stops, from the samples that have ended so far; None
        while too few of them agree.
    """

    def __init__(self, rule: SampleRule, num_samples: int, min_tokens: int = 0):
        """No sample is certain before it has `min_tokens` tokens."""
        self.limit: int | None = None
        self._rule = rule
        self._min_tokens = min_tokens
        self._pattern = None if rule.answer is None else compile_answer(rule.answer)
        self._samples = [_Sample() for _ in range(num_samples)]

    def until_probe(self, sample: int) -> int:
        """The number of tokens after which a sample must be read next, at the latest."""
        every = self._rule.probe_every
        return sys.maxsize if every is None else every - self._samples[sample].length % every

    def read(self, sample: int, length: int, text: str, *, has_ended: bool) -> None:
        """Take the text so far of a sample that has not ended.

        Args:
          sample: The index of the sample.
          length: The number of its tokens; never beyond the next probe.
          text: The text of these tokens.
          has_ended: Whether the sample ends here without the rule.
        """
        state = self._samples[sample]
        state.length = length
        if has_ended:
            self._end(state, self._answer_in(text))
        elif self._rule.probe_every is not None and length % self._rule.probe_every == 0:
            self._probe(state, self._answer_in(text))

    def fail(self, sample: int, length: int) -> None:
        """End a sample of `length` tokens whose next token could not be computed."""
        state = self._samples[sample]
        state.length, state.has_failed = length, True
        self._end(state, None)

    def has_ended(self, sample: int) -> bool:
        """Whether a sample has ended, by itself or because it is certain."""
        return self._samples[sample].has_ended

    def is_over(self, sample: int) -> bool:
        """Whether a sample needs no more tokens."""
        state = self._samples[sample]
        return state.has_ended or (self.limit is not None and state.length >= self.limit)

    @property
    def has_failed(self) -> bool:
        """Whether a token that the row needs could not be computed."""
        return any(sample.has_failed and self._counts(sample) for sample in self._samples)

    def outcomes(self) -> list[SampleOutcome]:
        """The ends of all samples, of which each must be over."""
        counted = [sample for sample in self._samples if self._counts(sample)]
        votes = Counter(sample.answer for sample in counted)
        votes[None] = 0
        outcomes = []
        for sample in self._samples:
            if not self._counts(sample):
                assert self.limit is not None
                outcomes.append(SampleOutcome(self.limit, None, 0, "agreement"))
                continue
            early = "certainty" if sample.is_certain else None
            outcomes.append(
                SampleOutcome(sample.length, sample.answer, votes[sample.answer], early)
            )
        return outcomes

    def kept(
        self, outcomes: Sequence[SampleOutcome], mean_logprobs: Sequence[float]
    ) -> Sequence[int]:
        """The indices of the samples to return; of equal samples, the first is returned.

        Samples that were stopped because others agree are not compared, as they are incomplete.
        `mean_logprobs` is used for `keep = "best"` only.
        """
        samples = range(len(outcomes))
        match self._rule.keep:
            case "majority":
                return [max(samples, key=lambda i: outcomes[i].votes)]
            case "best":
                ended = [i for i in samples if outcomes[i].stopped_early != "agreement"]
                return [max(ended, key=lambda i: mean_logprobs[i])]
            case "all":
                return samples

    def _answer_in(self, text: str) -> str | None:
        return None if self._pattern is None else find_answer(self._pattern, text)

    def _probe(self, state: _Sample, answer: str | None) -> None:
        assert self._rule.probes is not None
        is_equal = answer is not None and answer == state.answer
        state.num_equal = state.num_equal + 1 if is_equal else int(answer is not None)
        state.answer = answer
        if state.num_equal >= self._rule.probes and state.length >= self._min_tokens:
            state.is_certain = True
            self._end(state, answer)

    def _end(self, state: _Sample, answer: str | None) -> None:
        state.has_ended, state.answer = True, answer
        count = self._rule.stop_when
        if count is None or answer is None:
            return
        lengths = sorted(s.length for s in self._samples if s.has_ended and s.answer == answer)
        if len(lengths) >= count:
            agreed = lengths[count - 1]
            self.limit = agreed if self.limit is None else min(self.limit, agreed)

    def _counts(self, state: _Sample) -> bool:
        """Whether a sample has ended within the limit."""
        if not state.has_ended or self.limit is None:
            return state.has_ended
        # the token that a failed sample lacks comes after its last one
        return state.length + state.has_failed <= self.limit
