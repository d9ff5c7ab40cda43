"""Admits requests: checks lengths, ids and options against a plan and a model, before any runs.

Does not know about slots, calls or outputs. Guarantees: a request that the plan or the model cannot
serve is refused by name and never truncated; an admitted request needs no further check.
"""

from array import array
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

from ...compile.graphs.signatures import MAX_STOP_IDS
from ...compile.grids.bucket_grid import BucketGrid, NoBucketFits, NoDecodeSlots
from ...compile.grids.prefix_grid import PlannedPrefix
from ...modelzoo.weights.adapted_weight import NO_ADAPTER
from ..errors import RowError
from ..request import Request, SamplingParams
from ..structured.params import AllowedTokens
from ..structured.tables import PackedStructures
from ..text.detokenizer import TextCollector
from ..text.tokenizer import Tokenizer
from .actions import ScheduledRequest
from .padding import row_seed
from .shared_prefixes import SharedPrefix


@dataclass(frozen=True)
class AdmittedRequest:
    """A request that fits the grid, with its seed and stop ids resolved."""

    scheduled: ScheduledRequest
    request: Request
    seed: int
    stop_ids: tuple[int, ...]
    """The ids that end its sequences."""
    structure: int | None = None
    """The first state of the automaton of its answers, 0 without one; None in a plan without
    automata."""
    adapter: int | None = None
    """The number of its adapter, 0 without one; None in a plan without adapters."""


@dataclass
class Admission:
    """The limits of a plan and a model.

    Attributes:
      grid: The plan's buckets, which requests must fit.
      vocab_size: The number of token ids of the model, without padding.
      max_position: The number of positions of the model; no plan can make a row longer.
      eos_ids: Ids that end every sequence, unless a request sets `ignore_eos`.
      tokenizer: The model's tokenizer; None to refuse stop strings and answer patterns.
      run_seed: Derives the seeds of requests that have no seed of their own.
      structures: The automata of the plan; None in a plan without structured output.
      adapters: The names of the adapters in the parameters, in order of their numbers.
      other_tokens: Ids that stand for images, videos or sounds, by their keys in config.json.
    """

    grid: BucketGrid
    vocab_size: int
    max_position: int
    eos_ids: tuple[int, ...]
    tokenizer: Tokenizer | None = None
    run_seed: int = 0
    structures: PackedStructures | None = None
    adapters: Sequence[str] = ()
    other_tokens: Mapping[str, int] = field(default_factory=dict)
    _planned_ids: dict[PlannedPrefix, "array[int]"] = field(default_factory=dict, init=False)
    """The tokens of planned prefixes of admitted requests."""
    _shared_ids: MutableMapping[SharedPrefix, "array[int]"] = field(
        default_factory=WeakKeyDictionary, init=False
    )
    """The tokens of each shared prefix, then numbers for its scores and its adapter.

    An entry disappears when no request can begin with the prefix any more.
    """

    def admit(
        self, request: Request, number: int, prefix: SharedPrefix | None = None
    ) -> AdmittedRequest:
        """Check a request against the plan and the vocabulary, and resolve its options.

        Args:
          request: The request.
          number: Its number in the engine.
          prefix: The shared prefix with which its prompt begins, according to a hash.

        Raises:
          RowError: The plan or the model cannot serve the request.
        """
        params = request.params
        self._check_tokens(request)
        adapter = self._adapter_number(request)
        planned = self._planned_prefix(request)
        self._check_length(request)
        prompt_length = len(request.prompt_token_ids)
        max_total_length = min(self.grid.max_length, self.max_position)
        if params.max_tokens is not None:
            max_total_length = prompt_length + params.max_tokens
        structure = self._first_state(request, max_total_length - prompt_length)
        if params.prompt_logprobs is not None and not self.grid.score:
            raise RowError(
                "invalid_request",
                "prompt_logprobs: expected a plan with score graphs, got one without. Set "
                "buckets.score = true and build again.",
                "prompt_logprobs",
            )
        stop_ids = self._stop_ids(params)
        self._check_end(params, stop_ids)
        scheduled = ScheduledRequest(
            number,
            prompt_length,
            max_total_length,
            params.n,
            params.prompt_logprobs is not None,
            self._matching(prefix, request, adapter),
            planned,
        )
        seed = row_seed(params, self.run_seed, request.request_id)
        return AdmittedRequest(
            scheduled, _scored_as_needed(request), seed, stop_ids, structure, adapter
        )

    def _check_tokens(self, request: Request) -> None:
        """Refuse ids that the model does not have, and text without a tokenizer."""
        params, prompt = request.params, request.prompt_token_ids
        if len(prompt) == 0:
            raise RowError(
                "empty_prompt", "prompt: expected at least one token, got none.", "prompt"
            )
        check_ids("prompt", prompt, self.vocab_size)
        check_text("prompt", prompt, self.other_tokens)
        check_ids("stop_token_ids", params.stop_token_ids, self.vocab_size)
        check_ids("logit_bias", tuple(params.logit_bias or ()), self.vocab_size)
        TextCollector(self.tokenizer, params)  # refuses stop strings if there is no tokenizer
        if self.tokenizer is None and params.stopping and params.stopping.answer is not None:
            raise RowError(
                "invalid_request",
                "stopping.answer: expected none, as the model has no tokenizer, got "
                f"{params.stopping.answer!r}. Leave it out.",
                "stopping.answer",
            )

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
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

    def _check_end(self, params: SamplingParams, stop_ids: Sequence[int]) -> None:
        """Refuse `min_tokens` if of the allowed tokens only those that end an answer are left."""
        if not params.min_tokens or not isinstance(params.form, AllowedTokens):
            return
        assert self.structures is not None
        is_allowed_V = self.structures.automata[params.form.fingerprint].always_allowed.copy()
        is_allowed_V[list(stop_ids)] = False
        if not is_allowed_V.any():
            raise RowError(
                "invalid_request",
                "min_tokens: expected a token, besides those that end an answer, which "
                "allowed_token_ids and bad_words always allow, got none. Allow another token.",
                "min_tokens",
            )

    def _check_length(self, request: Request) -> None:
        """Refuse a request that is too long for the model or for the plan."""
        params, length = request.params, len(request.prompt_token_ids)
        # a row without max_tokens takes the positions that are left, so only min_tokens must fit
        needed = params.min_tokens or None if params.max_tokens is None else params.max_tokens
        output = 1 if needed is None else needed
        where = f"request {request.request_id!r}: "
        if length + output > self.max_position:
            raise RowError(
                "context_length_exceeded",
                f"{where}a prompt of length {length} and an output of {output} need "
                f"{length + output} positions; the model has {self.max_position}. Lower "
                f"max_tokens, or shorten the prompt.",
                "prompt",
            )
        try:
            self.grid.fit(length, needed)
        except NoDecodeSlots as error:
            raise RowError("invalid_request", f"{where}{error}", "max_tokens") from None
        except NoBucketFits as error:
            raise RowError("context_length_exceeded", f"{where}{error}", "prompt") from None

    def _adapter_number(self, request: Request) -> int | None:
        """The number of a request's adapter, 0 without one; None in a plan without adapters.

        Raises:
          RowError: There is no adapter of this name.
        """
        if request.adapter is None:
            return None if self.grid.adapters is None else NO_ADAPTER
        if request.adapter not in self.adapters:
            known = ", ".join(self.adapters) or "none"
            raise RowError(
                "invalid_request",
                f"model: expected the model or one of its adapters ({known}), got "
                f"{request.adapter!r}.",
                "model",
            )
        return NO_ADAPTER + 1 + self.adapters.index(request.adapter)

    def _planned_prefix(self, request: Request) -> PlannedPrefix | None:
        """The prefix of the plan with which a prompt begins.

        Raises:
          RowError: Another prompt begins with other tokens of the same hash.
        """
        if (prefixes := self.grid.prefixes) is None:
            return None
        token_ids = request.prompt_token_ids
        if (prefix := prefixes.prefix_of(token_ids, request.adapter)) is None:
            return None
        own = array("I", token_ids[: prefix.length])
        if self._planned_ids.setdefault(prefix, own) != own:
            raise RowError(
                "invalid_request",
                f"request {request.request_id!r}: expected the first {prefix.length} tokens to be "
                f"those of the other prompts with the hash {prefix.hash} in prefixes.shared, got "
                f"others. Remove this prefix from the plan.",
                "prompt",
            )
        return prefix

    def _first_state(self, request: Request, room: int) -> int | None:
        """The first state of the automaton of a request's answers, 0 without one.

        None in a plan without automata.

        Raises:
          RowError: The plan does not have the automaton, or the shortest answer does not fit.
        """
        form, structures = request.params.form, self.structures
        if form is None:
            return None if structures is None else 0
        state = None if structures is None else structures.first_states.get(form.fingerprint)
        if structures is None or state is None:
            raise RowError(
                "invalid_request",
                f"request {request.request_id!r}: expected a form of answers, or allowed tokens, "
                f"that the plan's [structured] has, got {form.fingerprint}. Leave out --plan, or "
                f"make a plan for such rows by noria plan; a job that has begun needs --restart, "
                f"too. In Python, give the form to LLM(structured_outputs=...).",
            )
        if (shortest := structures.automata[form.fingerprint].shortest) > room:
            raise RowError(
                "context_length_exceeded",
                f"request {request.request_id!r}: expected room for the shortest answer of its "
                f"form, {shortest} tokens, got {room}. Raise max_tokens.",
                "max_tokens",
            )
        return state

    def _matching(
        self, prefix: SharedPrefix | None, request: Request, adapter: int | None
    ) -> SharedPrefix | None:
        """The longest prefix on the path of `prefix` with which the prompt truly begins.

        The search for prefixes compares hashes, and different prompts may have equal hashes. The
        log-probabilities of a scored prefix include that of the token after it.
        """
        num_alternatives = request.params.prompt_logprobs
        is_scored = num_alternatives is not None
        while prefix is not None:
            own = array("I", request.prompt_token_ids[: prefix.length + is_scored])
            own.append(0 if num_alternatives is None else 1 + num_alternatives)
            own.append(adapter or NO_ADAPTER)
            if self._shared_ids.setdefault(prefix, own) == own:
                return prefix
            prefix = prefix.parent
        return None


def check_text(name: str, ids: Sequence[int], other_tokens: Mapping[str, int]) -> None:
    """Refuse ids that stand for images, videos or sounds, given by their keys in config.json."""
    for key, token in other_tokens.items():
        if token in ids:
            raise RowError(
                "invalid_token_id",
                f"{name}: expected text, got the id {token}, the {key} of config.json: only the "
                f"text part of the model is read. Leave out images, videos and sounds.",
                name,
            )


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Refuse token ids that the model does not have; `name` says where they stand."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise RowError(
                "invalid_token_id",
                f"{name}: expected ids from 0 to {vocab_size - 1}, got {token}.",
                name,
            )


def _scored_as_needed(request: Request) -> Request:
    """The request with log-probabilities of its output tokens, if its rule compares samples."""
    params = request.params
    if params.stopping is None or params.stopping.keep != "best" or params.logprobs is not None:
        return request
    return replace(request, params=replace(params, logprobs=0))
