"""Events of an engine step for its requests, in token ids and log-probabilities."""

from dataclasses import dataclass

from .request import TokenLogprob


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
