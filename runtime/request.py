"""The types of the runtime: sampling parameters, requests and outputs.

Names and defaults of `SamplingParams`, `RequestOutput` and `CompletionOutput` are vLLM's
(github.com/vllm-project/vllm, sampling_params.py, outputs.py); `docs/python.md` lists the
exceptions. Does not know about devices, buckets or files.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from ..modelzoo.sampling_parameters import MAX_INT, MAX_N, Parameter, SampledNumbers, table_of
from .errors import RowError, invalid_request
from .parameters.checks import (
    PLAIN,
    as_tuple,
    check_integer,
    check_number,
    check_parameter,
    plain_number,
    wrong_value,
)
from .parameters.vllm_options import SAMPLING, also_accepts
from .structured.answer_pattern import compile_answer
from .structured.params import AllowedTokens, StructuredOutputsParams

if TYPE_CHECKING:
    import numpy as np

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 32
MAX_LOGIT_BIAS = 300
MAX_PROBES = 1000
KEEP = ("all", "majority", "best")


@dataclass(frozen=True)
class SampleRule:
    """A rule for the samples of one request: their answers, when they stop, which are returned.

    `docs/samples.md` has the exact definition.

    Attributes:
      answer: A regular expression with at most one group, which finds the answer in a sample's
        text.
      stop_when: The number of samples that must end with the same answer for the others to stop.
      probe_every: The number of tokens from one probe of a sample's answer to the next.
      probes: The number of successive probes with the same answer after which a sample stops.
      keep: The samples to return: `all`, `majority` for the first with the most frequent answer, or
        `best` for the one with the highest mean log-probability.

    Raises:
      RowError: A value has a wrong type, is out of range, or has no effect without another.
    """

    answer: str | None = None
    stop_when: int | None = None
    probe_every: int | None = None
    probes: int | None = None
    keep: Literal["all", "majority", "best"] = "all"

    def __post_init__(self):
        """Check all values."""
        check_integer("stopping.stop_when", self.stop_when, 2, MAX_N, optional=True)
        check_integer("stopping.probe_every", self.probe_every, 1, MAX_INT, optional=True)
        check_integer("stopping.probes", self.probes, 1, MAX_PROBES, optional=True)
        if self.keep not in KEEP:
            raise wrong_value("stopping.keep", f"one of {', '.join(KEEP)}", self.keep)
        if (self.probe_every is None) != (self.probes is None):
            missing, other = "probes", "probe_every"
            if self.probes is not None:
                missing, other = other, missing
            raise wrong_value(f"stopping.{missing}", f"an integer beside {other}", None)
        if self.answer is None:
            if self.keep != "best" or self.stop_when is not None or self.probes is not None:
                raise wrong_value("stopping.answer", "a regular expression", None)
        elif not isinstance(self.answer, str) or not self.answer:
            raise wrong_value("stopping.answer", "a regular expression", self.answer)
        else:
            try:
                compile_answer(self.answer)
            except ValueError as error:
                raise invalid_request("stopping.answer", f"{error}") from None


@also_accepts(SAMPLING)
@dataclass(frozen=True)
class SamplingParams(SampledNumbers):
    """The sampling parameters of one request: those of `SampledNumbers`, and others.

    Attributes:
      seed: Seed of the request; None derives it from the run's seed and the request's id.
      stop: Strings that end a continuation.
      stop_token_ids: Token ids that end a continuation, besides the model's own.
      ignore_eos: Whether the model's own end tokens do not end a continuation.
      max_tokens: Maximum number of output tokens; None for all that the plan's `max_length` leaves;
        0 to score the prompt only, with `prompt_logprobs`.
      min_tokens: Number of output tokens before which no stop token is sampled.
      logprobs: Number of alternatives to report beside each output token; 0 reports the token
        alone, None reports nothing.
      prompt_logprobs: Number of alternatives to report beside each prompt token; None for nothing.
      skip_special_tokens: Whether special tokens are left out of the text.
      include_stop_str_in_output: Whether the text includes the stop string that ended it.
      logit_bias: Numbers that are added to logits, by token id, -100 to 100.
      allowed_token_ids: The only ids that are generated; None for all.
      bad_words: Texts whose tokens are never generated in their order, with or without a space
        before them.
      stopping: When continuations stop early, and which of them are returned.
      structured_outputs: The form that every continuation has.

    Raises:
      RowError: A value has a wrong type or is out of range.
    """

    seed: Annotated[int | None, Parameter("int64", -(2**63), 2**63 - 1)] = None
    stop: Annotated[tuple[str, ...] | list[str] | str, Parameter()] = ()
    stop_token_ids: Annotated[tuple[int, ...] | list[int], Parameter()] = ()
    ignore_eos: Annotated[bool, Parameter("bool", of_jobs=True)] = False
    max_tokens: Annotated[int | None, Parameter("int32", of_jobs=True)] = None
    min_tokens: Annotated[int, Parameter("int32", of_jobs=True)] = 0
    logprobs: Annotated[int | None, Parameter("int32", 0, MAX_LOGPROBS, in_body=False)] = None
    prompt_logprobs: Annotated[int | None, Parameter("int32", 0, MAX_LOGPROBS)] = None
    skip_special_tokens: Annotated[bool, Parameter("bool")] = True
    include_stop_str_in_output: Annotated[bool, Parameter("bool")] = False
    logit_bias: Annotated[Mapping[int, float] | None, Parameter()] = None
    allowed_token_ids: Annotated[tuple[int, ...] | list[int] | None, Parameter()] = None
    bad_words: Annotated[tuple[str, ...] | list[str], Parameter()] = ()
    stopping: SampleRule | None = None
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self):
        """Check all values, turn the stops into tuples, and numpy's numbers into Python's."""
        others = {name: x for name, x in vars(self).items() if type(x) not in PLAIN}
        for name, value in others.items():
            object.__setattr__(self, name, plain_number(value))
        stop = as_tuple("stop", (self.stop,) if isinstance(self.stop, str) else self.stop)
        object.__setattr__(self, "stop", stop)
        stop_ids = map(plain_number, as_tuple("stop_token_ids", self.stop_token_ids))
        object.__setattr__(self, "stop_token_ids", tuple(stop_ids))
        for name, entry in PARAMETERS.items():
            value, is_optional = getattr(self, name), getattr(SamplingParams, name) is None
            if value is not None or not is_optional:
                check_parameter(name, value, entry)
        _check_stops(stop, self.stop_token_ids)
        object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        object.__setattr__(self, "bad_words", _checked_words(self.bad_words))
        object.__setattr__(self, "allowed_token_ids", _checked_ids(self.allowed_token_ids))
        if self.max_tokens == 0 and self.prompt_logprobs is None:
            raise invalid_request(
                "max_tokens",
                "expected at least 1, got 0. To score a prompt set prompt_logprobs "
                "(in a batch file: echo and logprobs) beside max_tokens 0.",
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise wrong_value(
                "min_tokens", f"at most max_tokens ({self.max_tokens})", self.min_tokens
            )
        if self.stopping is not None:
            self._check_rule(self.stopping)
        if self.structured_outputs is not None:
            self._check_structured(self.structured_outputs)

    @cached_property
    def form(self) -> StructuredOutputsParams | AllowedTokens | None:
        """The form of the answers, or the tokens that are allowed in them; None for any answer."""
        if self.max_tokens == 0 or (self.allowed_token_ids is None and not self.bad_words):
            return self.structured_outputs
        ids, words = self.allowed_token_ids, self.bad_words
        return AllowedTokens(None if ids is None else tuple(ids), tuple(words))

    def _check_structured(self, form: StructuredOutputsParams) -> None:
        if not isinstance(form, StructuredOutputsParams):
            raise wrong_value("structured_outputs", "StructuredOutputsParams", form)
        # an end in the middle of a text would break its form, so the form alone ends it
        object.__setattr__(self, "stop", ())
        object.__setattr__(self, "stop_token_ids", ())
        for name in ("bad_words", "allowed_token_ids"):
            if value := getattr(self, name):
                raise wrong_value(name, "none beside structured_outputs", value)
        # so would no end where a text must end
        for name, value in {"ignore_eos": self.ignore_eos, "min_tokens": self.min_tokens}.items():
            if value:
                expected = "none beside structured_outputs, which decides where answers end"
                raise wrong_value(name, expected, value)
        if self.max_tokens == 0:
            raise wrong_value("structured_outputs", "none beside max_tokens 0", "a form")

    def _check_rule(self, rule: SampleRule) -> None:
        if not isinstance(rule, SampleRule):
            raise wrong_value("stopping", "a SampleRule", rule)
        if self.prompt_logprobs is not None:
            raise invalid_request(
                "stopping",
                "expected no scored prompt beside it, got one. Score the prompt in a row "
                "of its own, without prompt_logprobs or echo with logprobs here.",
            )
        if self.n == 1 and rule.probes is None:
            raise invalid_request(
                "stopping",
                "expected n of at least 2, as a single sample has nothing to agree with, "
                "got n = 1. Raise n, or give probe_every and probes.",
            )
        if rule.stop_when is not None and rule.stop_when > self.n:
            raise wrong_value("stopping.stop_when", f"at most n ({self.n})", rule.stop_when)


PARAMETERS = table_of(SamplingParams)
"""The table of all sampling parameters, by the names of their fields."""


@dataclass(frozen=True)
class Request:
    """One prompt in token ids with its sampling parameters, ready for admission."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt: str | None = None
    adapter: str | None = None
    """The name of the adapter that answers it; None for the model itself."""
    places: Sequence[str] = ()
    """The names that errors use for the texts of a request for vectors; empty for `input`."""


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one token under the raw logits, with the likeliest alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class CompletionOutput:
    """One sampled continuation of a request."""

    index: int
    """The number of the sample, also if a rule keeps only this one of several samples."""
    text: str
    token_ids: list[int]
    finish_reason: str | None
    """`stop` (stop token or string), `length`, or None if only the prompt was scored."""
    stop_reason: int | str | None = None
    """The caller's stop string or stop token id; None for the model's own end token."""
    logprobs: list[TokenLogprob] | None = None
    cumulative_logprob: float | None = None
    dropped_expert_choices: int = 0
    """Dropped expert choices of the prompt and this continuation, summed over all layers; 0 without
    a capacity."""
    answer: str | None = None
    """The answer in the text, if the request has a rule that finds one."""
    votes: int = 0
    """The number of samples of the request that ended with this answer."""
    stopped_early: Literal["agreement", "certainty"] | None = None
    """Why a rule stopped the continuation, which then has the finish reason `stop`."""


@dataclass(frozen=True)
class SampleCounts:
    """Counts over all samples of a request with a rule, returned or not."""

    total: int
    stopped: int
    output_tokens: int
    tokens_left: int
    """The tokens that `max_tokens` still allowed the samples which stopped early."""


@dataclass(frozen=True)
class RequestMetrics:
    """Times of a request in seconds on the engine's monotonic clock, with the usual definitions.

    Time to first token is `first_token - arrival`, queueing included; inter-token latency is
    `(finished - first_token) / (tokens - 1)` of the longest sequence, and output tokens per second
    are its inverse. A call emits several tokens at once, so the time of a token is the end of its
    call.
    """

    arrival: float
    first_token: float | None
    finished: float


@dataclass
class RequestOutput:
    """The result of one request: outputs, or an error and no outputs."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One entry per prompt token; the first is None, as nothing predicts the first token."""
    error: RowError | None = None
    metrics: RequestMetrics | None = None
    finished: bool = True
    dropped_expert_choices: int = 0
    """Dropped expert choices of the prompt, counted once, and of all continuations. If the prompt
    was prefilled several times, the largest count is taken."""
    vectors: "np.ndarray | None" = None
    """The float32 vector of each text of an embedding request; None for other requests."""
    samples: SampleCounts | None = None
    """Counts over all samples, if the request has a rule for them."""


def hashed_seed(seed: int, name: str) -> int:
    """The 64-bit seed of a part of a run, by the seed of the run and the name of the part."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{name}".encode()).digest()[:8], "big")


def _check_stops(stop: Sequence[str], stop_token_ids: Sequence[int]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise wrong_value("stop", f"at most {MAX_STOP_STRINGS} strings", f"{len(stop)} strings")
    for text in stop:
        if not isinstance(text, str) or not text:
            raise wrong_value("stop", "non-empty strings", text)
    if len(stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise wrong_value(
            "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids", f"{len(stop_token_ids)} ids"
        )
    for token in stop_token_ids:
        check_integer("stop_token_ids", token, 0, MAX_INT)


def _checked_bias(logit_bias: Any) -> dict[int, float] | None:
    if logit_bias is None:
        return None
    if not isinstance(logit_bias, Mapping):
        raise wrong_value("logit_bias", "a mapping from token ids to numbers", logit_bias)
    if len(logit_bias) > MAX_LOGIT_BIAS:
        raise wrong_value(
            "logit_bias", f"at most {MAX_LOGIT_BIAS} entries", f"{len(logit_bias)} entries"
        )
    plain = {plain_number(token): plain_number(bias) for token, bias in logit_bias.items()}
    for token, bias in plain.items():
        check_integer("logit_bias", token, 0, MAX_INT)
        check_number(f"logit_bias[{token}]", bias, -100.0, 100.0)
    return plain


def _checked_words(words: Any) -> tuple[str, ...]:
    words = as_tuple("bad_words", words)
    for word in words:
        if not isinstance(word, str) or not word.strip():
            raise wrong_value("bad_words", "texts that are not only spaces", word)
    return words


def _checked_ids(token_ids: Any) -> tuple[int, ...] | None:
    if token_ids is None:
        return None
    ids = tuple(map(plain_number, as_tuple("allowed_token_ids", token_ids)))
    if not ids:
        raise wrong_value("allowed_token_ids", "at least one id", [])
    for token in ids:
        check_integer("allowed_token_ids", token, 0, MAX_INT)
    return ids
