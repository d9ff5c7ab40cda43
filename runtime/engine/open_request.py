"""A request between its submission and its return, as its tokens and its text grow.

Knows nothing of the engine or of when anything happens.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..errors import RowError
from ..request import CompletionOutput, Request, TokenLogprob
from ..text.collector import TextCollector
from .engine import AdmittedRequest


@dataclass
class Continuation:
    """One sequence as it grows."""

    collector: TextCollector
    output: CompletionOutput

    def finish(self) -> CompletionOutput:
        """The output with its text."""
        output = self.output
        output.text = self.collector.finish()
        if output.logprobs is not None:
            output.cumulative_logprob = math.fsum(score.logprob for score in output.logprobs)
        return output


@dataclass
class OpenRequest:
    """One request between submission and return."""

    request: Request
    admitted: AdmittedRequest
    arrival: float
    continuations: list[Continuation]
    open_sequences: int
    first_token: float | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    dropped_of_prompt: Counter[int] = field(default_factory=Counter)
    """Choices of experts, by the first sequence of those that share a reading of the prompt."""
    error: RowError | None = None

    def ends_on_id(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of the tokens ends a sequence."""
        return bool(token_ids) and token_ids[-1] in self.admitted.stop_ids

    def read(self, sample: int, token_ids: Sequence[int], *, has_ended: bool) -> bool:
        """Add tokens to the text of a sequence; whether a stop string has ended it."""
        collector = self.continuations[sample].collector
        ends_on_id = has_ended and self.ends_on_id(token_ids)
        return collector.push(token_ids, ends_with_stop_token=ends_on_id)

    def count_dropped(self) -> int:
        """Choices that the request lost; its continuations get those of the prompt, too.

        Where a prompt was read more than once, as its sequences found no slots together, the
        reading that lost most counts for all.
        """
        of_prompt = max(self.dropped_of_prompt.values(), default=0)
        outputs = [continuation.output for continuation in self.continuations]
        total = of_prompt + sum(output.dropped_expert_choices for output in outputs)
        for output in outputs:
            output.dropped_expert_choices += of_prompt
        return total
