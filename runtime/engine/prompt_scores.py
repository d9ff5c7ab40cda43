"""Collects the log-probabilities of prompts that are scored piece by piece.

The pieces of a shared prefix are scored once. Each prompt that begins with it gets their
log-probabilities, also that of the token after the prefix: the prompts have it in common (see
`prefix_index`).

Does not know about devices. Guarantees: a prompt has the same log-probabilities whether its
beginning is computed or copied.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from weakref import WeakKeyDictionary

from ...modelzoo.sampling import TokenScores
from ..request import Request, TokenLogprob
from .actions import PromptPiece
from .admission import AdmittedRequest
from .call_results import PromptScored, token_logprob
from .shared_prefixes import SharedPrefix


class PromptScores:
    """The log-probabilities of prompts that are not complete, and of shared prefixes."""

    def __init__(self):
        self._of_prompts: dict[tuple[int, int], list[TokenLogprob]] = {}
        """Log-probabilities of the pieces so far, by the number of the request and the first of the
        sequences for which the prompt is prefilled."""
        self._of_prefixes: MutableMapping[SharedPrefix, list[TokenLogprob]] = WeakKeyDictionary()
        """Log-probabilities that a prefix adds to its parent, while requests may begin with it."""

    def add(
        self,
        rows: Iterable[PromptPiece],
        scores: TokenScores,
        requests: Mapping[int, AdmittedRequest],
    ) -> list[PromptScored]:
        """Add the results of a scored call; return an event for each complete prompt.

        Args:
          rows: The pieces that were scored, those of a prompt in order.
          scores: The results of the call.
          requests: The requests of the rows, by their numbers.
        """
        events: list[PromptScored] = []
        for i, row in enumerate(rows):
            number = row.sequence.request.number
            if row.num_known is not None:
                # the first run of the prompt was reported
                continue
            own = _scores_of(requests[number].request, scores, i, row)
            if row.is_of_prefix:
                self._of_prefixes.setdefault(_prefix_of(row), []).extend(own)
                continue
            prompt = number, row.sequence.sample
            if prompt not in self._of_prompts:
                self._of_prompts[prompt] = self._before(row)
            self._of_prompts[prompt] += own
            if row.is_last:
                events.append(PromptScored(number, self._of_prompts.pop(prompt)))
        return events

    def _before(self, row: PromptPiece) -> list[TokenLogprob]:
        """The log-probabilities that come with the copied beginning of a prompt."""
        prefix = row.sequence.request.prefix
        path = [] if prefix is None else prefix.path
        copied = [prefix for prefix in path if prefix.length <= row.start]
        return [score for prefix in copied for score in self._of_prefixes[prefix]]


def num_alternatives(request: Request) -> int:
    """The number of alternatives to each prompt token that a request asks for; -1 for no scores."""
    count = request.params.prompt_logprobs
    return -1 if count is None else count


def _prefix_of(row: PromptPiece) -> SharedPrefix:
    """The shared prefix to which a piece belongs."""
    prefix = row.sequence.request.prefix
    assert prefix is not None
    return next(p for p in prefix.path if p.length >= row.start + row.count)


def _scores_of(
    request: Request, scores: TokenScores, index: int, row: PromptPiece
) -> list[TokenLogprob]:
    """Log-probabilities of the prompt tokens at positions `start + 1` to `start + count`."""
    next_ids = request.prompt_token_ids[row.start + 1 : row.start + row.count + 1]
    count = num_alternatives(request)
    return [token_logprob(scores, (index, t), token, count) for t, token in enumerate(next_ids)]
