"""Checks the keys of the body of a request, and names those that change no answer.

Hosted services and vLLM have keys that noria need not know to answer: hints about accounts and
speed, and options whose default is what noria does. The tables say which values of each key have no
effect; another value is refused by name, with the remedy. Does not know about the keys that decide
an answer. Guarantees: one error names all keys of a body that are refused.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..errors import RowError, joined, unknown_parameter
from ..parameters.checks import whole_number, wrong_value
from ..parameters.vllm_options import ANY, CHAT, NOT_OFFERED, OFF, SAMPLING, AcceptedValues

MAX_TOKEN_ID = 2**31 - 1
_ON = AcceptedValues((True,), NOT_OFFERED)
_NONE = AcceptedValues(([], {}), NOT_OFFERED)

HINTS: Mapping[str, AcceptedValues] = dict.fromkeys(
    (
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prediction",
        "verbosity",
        "priority",
        "request_id",
        "cache_salt",
    ),
    ANY,
)
"""Keys for the accounts, the caches, the queues and the models of hosted services."""


def refused(remedy: str, *keys: str) -> dict[str, AcceptedValues]:
    """Keys without a harmless value, and their remedy."""
    return dict.fromkeys(keys, AcceptedValues((), remedy))


_OF_OTHER_SERVERS = {
    **refused("Give max_tokens", "max_new_tokens", "max_length", "n_predict", "num_predict"),
    **refused("Give min_tokens", "min_new_tokens", "min_length"),
    **refused("Give stop", "stop_sequences", "stop_strings", "stop_words"),
    **refused("Give temperature, 0 for greedy decoding", "do_sample", "temp"),
    **refused("Give n", "num_return_sequences"),
    **refused("Give repetition_penalty", "repeat_penalty", "repeat_last_n"),
    **refused("Give bad_words", "bad_words_ids", "suppress_tokens", "begin_suppress_tokens"),
    **refused("Give chat_template_kwargs", "enable_thinking", "thinking", "chat_template_args"),
    **refused("Give the name of an adapter as model", "lora_request", "lora_name", "adapter_id"),
    **refused("Write its keys into the body", "extra_body", "sampling_params", "parameters"),
    **refused("Write a system message", "system", "system_prompt"),
    **refused(NOT_OFFERED, "forced_bos_token_id", "forced_eos_token_id", "web_search_options"),
    **dict.fromkeys(
        (
            *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "mirostat", "top_a"),
            *("xtc_probability", "dry_multiplier", "penalty_alpha", "diversity_penalty"),
            *("epsilon_cutoff", "eta_cutoff", "smoothing_factor", "dynatemp_range"),
        ),
        AcceptedValues((0,), NOT_OFFERED),
    ),
    **dict.fromkeys(
        ("typical_p", "num_beams", "num_beam_groups", "tfs", "tfs_z", "guidance_scale"),
        AcceptedValues((1,), NOT_OFFERED),
    ),
}
"""Keys of transformers and of other servers that change answers, so they are never ignored."""

_GENERATION = {
    **HINTS,
    **_OF_OTHER_SERVERS,
    **SAMPLING,
    "best_of": AcceptedValues((1,), "Use n"),
    "detokenize": AcceptedValues((True,), "Answers have their text: leave it out"),
    "return_tokens_as_token_ids": OFF,
    "return_token_ids": OFF,
    "kv_transfer_params": _NONE,
    "vllm_xargs": _NONE,
    "mm_processor_kwargs": _NONE,
    **refused("Give tools", "functions"),
    **refused("Give tool_choice", "function_call"),
    **refused("A batch has no streams", "stream_options"),
    **refused("Only continuations of the prompt are generated", "suffix"),
    **refused(
        "Give response_format, or structured_outputs",
        *("structural_tag", "guided_decoding_backend", "guided_whitespace_pattern"),
        *("json_schema", "grammar", "regex", "ebnf"),
    ),
}
OF_CHAT: Mapping[str, AcceptedValues] = {
    **_GENERATION,
    "echo": AcceptedValues((False,), "Only /v1/completions echoes its prompt"),
    "add_special_tokens": OFF,
    "include_reasoning": _ON,
    "documents": _NONE,
    "modalities": AcceptedValues((["text"],), "Answers are texts"),
    "chat_template": CHAT["chat_template"],
    "chat_template_content_format": CHAT["chat_template_content_format"],
    **refused("Give chat_template_kwargs, if the template reads it", "reasoning_effort"),
}
"""The other keys of a chat, with the values that change no answer."""
OF_COMPLETIONS: Mapping[str, AcceptedValues] = {
    **_GENERATION,
    "add_special_tokens": _ON,
    **refused("Only /v1/chat/completions has tools", "tools", "tool_choice", "parallel_tool_calls"),
    **refused("In /v1/completions, logprobs is the number of alternatives", "top_logprobs"),
}
"""The other keys of a completion, with the values that change no answer."""


def given_values(body: Mapping[str, Any], integers: Collection[str]) -> dict[str, Any]:
    """The keys of a body that have a value.

    Args:
        body: The body, or a part of it.
        integers: The keys with integers; some languages write 3 as 3.0.
    """
    return {
        key: whole_number(value) if key in integers else value
        for key, value in body.items()
        if value is not None
    }


def max_prompt_tokens(given: Mapping[str, Any]) -> int | None:
    """The value of `truncate_prompt_tokens`; -1 for the length of the model, None for no limit."""
    key = "truncate_prompt_tokens"
    value = given.get(key)
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    if value is not None and not (is_integer and (value >= 1 or value == -1)):
        raise wrong_value(key, "an integer of at least 1, or -1", value)
    return value


def switch(given: Mapping[str, Any], key: str, *, default: bool = False) -> bool:
    """The value of a key that is true or false; RowError if it is neither."""
    value = given.get(key, default)
    if not isinstance(value, bool):
        raise wrong_value(key, "true or false", value)
    return value


def check_ids(where: str, ids: Sequence[Any], param: str) -> None:
    """Raise RowError unless the items of a list are token ids."""
    for index, token in enumerate(ids):
        # bool is an int in Python, but true is no token
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_TOKEN_ID:
            got = f"{str(token)[:50]} at index {index}"
            raise RowError("invalid_token_id", f"{where}: expected token ids, got {got}.", param)


def check_keys(
    given: Mapping[str, Any], known: tuple[str, ...], others: Mapping[str, AcceptedValues]
) -> None:
    """Check that each key is known, or has a value that changes no answer.

    Raises:
        RowError: The error names all other keys.
    """
    errors = []
    for key, value in given.items():
        accepted = others.get(key)
        if key in known or (accepted is not None and accepted.has(value)):
            continue
        errors.append(
            unknown_parameter(key, known) if accepted is None else _refusal(key, value, accepted)
        )
    if errors:
        raise joined(errors)


def _refusal(key: str, value: object, accepted: AcceptedValues) -> RowError:
    message = f"{key!r} is not supported here."
    if accepted.values:
        expected = " or ".join(dict.fromkeys(map(json.dumps, accepted.values)))
        message = wrong_value(key, expected, value).message
    return RowError("unknown_parameter", f"{message} {accepted.remedy}.", key)


def unknown_among(
    body: Mapping[str, Any], known: tuple[str, ...], others: Mapping[str, AcceptedValues]
) -> tuple[str, ...]:
    """The keys of a body that noria does not know; it knows those that it refuses."""
    return tuple(key for key in body if key not in known and key not in others)
