"""Translates the body of an OpenAI request into SamplingParams, for both endpoints.

The two endpoints share most keys. `logprobs` is a number for completions and a switch for chat, and
`echo` exists for completions only. Unknown keys and unsupported keys are refused by name, because
an answer that ignores a parameter is worse than an error (`body_keys`). A key with the value null
counts as absent, as OpenAI's clients write it. Whole numbers such as 3.0 are integers.

Does not know about lines, ids, tokenizers or buckets. Guarantees: every body gives `BodyParams` or
raises `RowError`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..errors import ConfigError, RowError, UserError, invalid_request, joined, unknown_parameter
from ..parameters.checks import INTEGERS, check_integer, whole_number, wrong_value
from ..parameters.vllm_options import AcceptedValues
from ..request import MAX_LOGPROBS, PARAMETERS, SampleRule, SamplingParams
from .body_keys import (
    OF_CHAT,
    OF_COMPLETIONS,
    check_keys,
    given_values,
    max_prompt_tokens,
    switch,
)
from .structured_body import FORM_KEYS, read_form
from .tools import TOOL_KEYS, Tools, read_tools

_DIRECT = tuple(name for name, entry in PARAMETERS.items() if entry.in_body)
"""Keys with the name and the meaning of a field of SamplingParams."""
_MAX_TOKENS = "max_completion_tokens"
"""The key of OpenAI's interface of which `max_tokens` is the deprecated name."""
_ID_LISTS = ("stop_token_ids", "allowed_token_ids")
_INTEGERS = (
    *(key for key in _DIRECT if PARAMETERS[key].dtype in INTEGERS),
    *(_MAX_TOKENS, "logprobs", "top_logprobs", "truncate_prompt_tokens"),
)
_RULE_INTEGERS = ("stop_when", "probe_every", "probes")
_RULE = "noria"
"""The key of the rule for the samples of a row, an extension of OpenAI's interface."""
_COMMON = (
    *(*_DIRECT, _MAX_TOKENS, *FORM_KEYS),
    *(_RULE, "model", "logprobs", "stream", "truncate_prompt_tokens"),
)
_JOB_KEYS = tuple(key for key in _DIRECT if PARAMETERS[key].of_jobs)
"""Keys that a job may set for all rows."""
_PREFILL_KEYS = ("add_generation_prompt", "continue_final_message")
CHAT_KEYS = (
    *(*_COMMON, "messages", "top_logprobs", "chat_template_kwargs", *TOOL_KEYS),
    *_PREFILL_KEYS,
)
COMPLETION_KEYS = (*_COMMON, "prompt", "echo")


@dataclass(frozen=True, kw_only=True)
class BodyParams:
    """The sampling parameters in a body, and the extra contents that its answer must show."""

    params: SamplingParams
    echo: bool = False
    logprobs: int | None = None
    """Number of alternatives to show for each token of the answer and of the echoed prompt."""
    prompt_logprobs: int | None = None
    """Number of alternatives to show in the separate `prompt_logprobs` field."""
    tools: Tools | None = None
    """The tools that the model may call, or must call."""
    max_prompt_tokens: int | None = None
    """The number of the prompt's last tokens to keep; -1 for the length of the model."""
    add_generation_prompt: bool = True
    """Whether the prompt of a chat ends with the beginning of the assistant's answer."""
    continue_final_message: bool = False
    """Whether the answer continues the last message of a chat."""


def read_params(
    body: Mapping[str, Any], *, is_chat: bool, defaults: Mapping[str, Any]
) -> BodyParams:
    """Translate a body.

    Args:
        body: The body of a request.
        is_chat: Whether the endpoint is /v1/chat/completions.
        defaults: SamplingParams fields for keys that the body leaves out.

    Raises:
        RowError: A key is unknown or unsupported, or its value is invalid.
    """
    given = given_values(body, _INTEGERS)
    check_keys(given, *key_tables(is_chat))
    if switch(given, "stream"):
        raise invalid_request("stream", "expected false in a batch, got true.")
    fields: dict[str, Any] = dict(defaults)
    for key in _DIRECT:
        if key in given:
            fields[key] = _READERS[key](given[key]) if key in _READERS else given[key]
    limit_key = _MAX_TOKENS if _MAX_TOKENS in given else "max_tokens"
    if limit_key in given:
        fields["max_tokens"] = given[limit_key]
    echo = switch(given, "echo")
    logprobs = _chat_logprobs(given) if is_chat else _count(given, "logprobs")
    prompt_logprobs = _count(given, "prompt_logprobs")
    fields["logprobs"] = None if fields.get("max_tokens") == 0 else logprobs
    if echo and logprobs is not None:
        # an echoed prompt shows its log-probabilities in the same list as the answer
        fields["prompt_logprobs"] = max(logprobs, prompt_logprobs or 0)
    asked = ""
    try:
        if _RULE in given:
            fields["stopping"] = _read_rule(given[_RULE])
        tools, form = read_tools(given), read_form(given)
        forced = tools and tools.form()
        asked = "tool_choice" if forced else next((key for key in FORM_KEYS if key in given), "")
        if tools is not None and forced is not None and form is not None:
            raise wrong_value("tool_choice", "none or auto beside a form of answers", tools.choice)
        # the form of the job is for answers of rows that say nothing about theirs
        if forced or any(key in given for key in FORM_KEYS) or fields.get("max_tokens") == 0:
            fields["structured_outputs"] = forced or form
        params = SamplingParams(**fields)
    except RowError as error:
        keys = {"max_tokens": limit_key, "stopping": _RULE}
        keys |= {"structured_outputs": asked} if asked else {}
        raise _in_body_keys(error, keys) from None
    return BodyParams(
        params=params,
        echo=echo,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        tools=tools,
        max_prompt_tokens=max_prompt_tokens(given),
        **_read_prefill(given),
    )


def read_sampling(assignments: Sequence[str]) -> dict[str, Any]:
    """The sampling parameters in the values of `--sampling`, as `max_tokens=64`.

    Raises:
        ConfigError: A key is unknown, or its value is no JSON or invalid.
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        try:
            if not equals:
                raise UserError("expected KEY=VALUE")
            if key not in _JOB_KEYS:
                raise unknown_parameter(key, _JOB_KEYS)
            value = json.loads(text)
            values[key] = whole_number(value) if key in _INTEGERS else value
            read_params(values, is_chat=False, defaults={})
        except ValueError as error:
            raise ConfigError(
                f"--sampling {assignment}: {error} Write KEY=VALUE with one of "
                f"{', '.join(_JOB_KEYS)} and a value in JSON."
            ) from None
    return values


def _in_body_keys(error: RowError, keys: Mapping[str, str]) -> RowError:
    """An error of `SamplingParams` with the key of the body in place of the name of the field."""
    field, dot, rest = (error.param or "").partition(".")
    form = keys.get("structured_outputs", "structured_outputs")
    message = error.message.replace("beside structured_outputs", f"beside {form}", 1)
    message = message.replace(field, keys.get(field, field), 1)
    return RowError(error.code, message, f"{keys.get(field, field)}{dot}{rest}")


def key_tables(is_chat: bool) -> tuple[tuple[str, ...], Mapping[str, AcceptedValues]]:
    """The keys that decide an answer, and the other keys with their harmless values."""
    return (CHAT_KEYS, OF_CHAT) if is_chat else (COMPLETION_KEYS, OF_COMPLETIONS)


def _read_prefill(given: Mapping[str, Any]) -> dict[str, bool]:
    """Whether the prompt ends with the beginning of an answer, or within the last message."""
    begins = switch(given, "add_generation_prompt", default=True)
    continues = switch(given, "continue_final_message")
    if begins and continues:
        expected = "false beside continue_final_message"
        raise wrong_value("add_generation_prompt", expected, True)
    return {"add_generation_prompt": begins, "continue_final_message": continues}


def _count(given: Mapping[str, Any], key: str) -> int | None:
    value = given.get(key)
    check_integer(key, value, 0, MAX_LOGPROBS, optional=True)
    return value


def _chat_logprobs(given: Mapping[str, Any]) -> int | None:
    is_wanted = switch(given, "logprobs")
    count = _count(given, "top_logprobs")
    if count and not is_wanted:
        raise RowError(
            "invalid_request", "top_logprobs: expected logprobs to be true beside it.", "logprobs"
        )
    return (count or 0) if is_wanted else None


def _read_stop(value: object) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise wrong_value("stop", "a string or a list of strings", value)
    return texts


def _read_ids(value: object, key: str) -> list[int]:
    if not isinstance(value, list):
        raise wrong_value(key, "a list of token ids", value)
    return list(map(whole_number, value))


def _read_logit_bias(value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise wrong_value("logit_bias", "an object of token ids and numbers", value)
    for key in value:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise wrong_value("logit_bias", "token ids as keys", key)
    bias = {int(key): number for key, number in value.items()}
    if len(bias) < len(value):
        raise wrong_value("logit_bias", "each token id once", "one spelt in two ways")
    return bias


def _read_rule(value: object) -> SampleRule:
    if not isinstance(value, dict):
        raise wrong_value(_RULE, "an object", value)
    known = tuple(SampleRule.__dataclass_fields__)
    given = given_values(value, _RULE_INTEGERS)
    errors = [unknown_parameter(key, known) for key in given if key not in known]
    if errors:
        error = joined(errors)
        raise RowError(error.code, f"{_RULE}: {error.message}", f"{_RULE}.{error.param}")
    return SampleRule(**given)


_READERS: dict[str, Callable[[Any], Any]] = {
    "stop": _read_stop,
    **{key: partial(_read_ids, key=key) for key in _ID_LISTS},
    "logit_bias": _read_logit_bias,
}
