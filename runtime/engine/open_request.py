"""The state of a request between submission and return: its tokens and its text.

Does not know about the engine's calls or their order.
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


@dataclass
class OpenRequest:
    """A request that was submitted and not yet returned."""

    request: Request
    admitted: AdmittedRequest
    arrival: float
    continuations: list[Continuation]
    open_sequences: int
    first_token: float | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    dropped_of_prompt: Counter[int] = field(default_factory=Counter)
    """Expert choices dropped in prefill, by the first sequence that shares the prefilled prompt."""
    error: RowError | None = None

    def ends_on_id(self, token_ids: Sequence[int]) -> bool:
        """Whether the last token is a stop id of the request."""
        return bool(token_ids) and token_ids[-1] in self.admitted.stop_ids

    def read(self, sample: int, token_ids: Sequence[int], *, has_ended: bool) -> bool:
        """Add tokens to the text of a sequence; return whether a stop string has ended it."""
        collector = self.continuations[sample].collector
        ends_on_id = has_ended and self.ends_on_id(token_ids)
        return collector.push(token_ids, ends_with_stop_token=ends_on_id)

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
