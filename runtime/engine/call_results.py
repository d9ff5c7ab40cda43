"""The results of a call as arrays on the host, and the events that they mean for requests.

Does not know about devices or text.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ...compile.graphs.steps import NO_TOKEN
from ...modelzoo.sampling import TokenScores
from ..request import TokenLogprob
from .actions import NOTHING_READ, ReadEntries, ScheduledSequence


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
    """The number of expert choices that one call dropped because an expert's capacity was full."""

    number: int
    sample: int
    """The sequence that lost the choices; for a prompt, the first sequence that shares it."""
    is_of_prompt: bool
    count: int


Event = PromptScored | TokensEmitted | ChoicesDropped


@dataclass
class CallResults:
    """The results of a call on the host."""

    action: Any
    output: Any
    seconds: float
    ended: float
    """The time at which the call ended."""
    sequences: Mapping[int, ScheduledSequence] = field(default_factory=dict)
    """The sequences that were in the slots during the call, for calls on slots."""
    num_known: Mapping[int, int] = field(default_factory=dict)
    """For slots of replays, the number of ids in a decode call that were emitted before."""
    closed: set[int] = field(default_factory=set)
    """Slots whose sequences the host ended after the call, although they emitted nothing new."""
    read: ReadEntries = NOTHING_READ
    """The entries in whole pages that rows read in a decode call."""

    @cached_property
    def num_emitted_B(self) -> np.ndarray:
        """Number of ids that each slot emitted in a decode call; ids precede padding in a slot."""
        return np.count_nonzero(self.output.tokens_BQ != NO_TOKEN, axis=1)

    def ids_of(self, slot: int) -> list[int]:
        """The ids that a slot emitted in a decode call, without those that were known."""
        first = self.num_known.get(slot, 0)
        return self.output.tokens_BQ[slot, first : self.num_emitted_B[slot]].tolist()

    def is_known(self, slot: int) -> bool:
        """Whether nothing is new in a decode call: all ids of a slot were emitted before."""
        num_known = self.num_known.get(slot)
        has_ended = self.has_ended(slot) or slot in self.closed
        return num_known == self.num_emitted_B[slot] and not has_ended

    def has_ended(self, slot: int) -> bool:
        """Whether the device ended the sequence in a slot during a decode call."""
        return not self.output.is_active_B[slot]

    def emitted(self, slot: int, num_logprobs: int | None) -> TokensEmitted:
        """The event of a slot in a decode call, with log-probabilities if a number is given."""
        sequence, token_ids, scores = self.sequences[slot], self.ids_of(slot), []
        if num_logprobs is not None:
            scores = [
                token_logprob(self.output.scores, (slot, q), token_id, num_logprobs)
                for q, token_id in enumerate(token_ids, start=self.num_known.get(slot, 0))
            ]
        return TokensEmitted(
            number=sequence.request.number,
            sample=sequence.sample,
            token_ids=token_ids,
            scores=scores,
            is_finished=self.has_ended(slot),
            is_finite=bool(self.output.is_finite_B[slot]),
        )

    def dropped(
        self, rows: Iterable[tuple[int, ScheduledSequence]], *, is_of_prompt: bool
    ) -> list[ChoicesDropped]:
        """An event for each row that lost expert choices.

        Args:
          rows: Pairs of batch indices and sequences.
          is_of_prompt: Whether the call was a prefill.
        """
        num_dropped_B = self.output.experts.num_dropped_B
        return [
            ChoicesDropped(
                sequence.request.number, sequence.sample, is_of_prompt, int(num_dropped_B[row])
            )
            for row, sequence in rows
            if num_dropped_B[row]
        ]


def token_logprob(
    scores: TokenScores, index: tuple[int, int], token_id: int, num_alternatives: int
) -> TokenLogprob:
    """The log-probability of a token, with its likeliest alternatives.

    Args:
      scores: The scores of a call on the host.
      index: The batch index and the position of the token in `scores`.
      token_id: The id of the token.
      num_alternatives: The number of alternatives to return.
    """
    ids = scores.top_ids_BR[index][:num_alternatives]
    values = scores.top_logprobs_BR[index][:num_alternatives]
    top = tuple((int(i), float(v)) for i, v in zip(ids, values, strict=True))
    return TokenLogprob(token_id, float(scores.logprob_B[index]), top)
