"""Check chat messages, and copy them for a chat template.

A key of a message or a tool call with the value None counts as absent, and templates do not see
it; the keys of arguments stay. `read_messages` is the check for requests of users, and
`normalise_messages` takes any role and key. Does not know about templates or tokens. Guarantees:
the result is a copy in plain lists, dicts and strings that can be encoded as UTF-8; anything else
is refused with its place, such as `messages[2].content`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..errors import RowError, invalid_request, joined, unknown_parameter
from ..parameters.checks import wrong_value
from .tokenizer import encoding_error

ROLES = ("system", "developer", "user", "assistant", "tool")

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of the reasoning before an answer; templates read the first or the second."""
_WITHOUT_EFFECT = ("annotations", "parsed")
"""Keys that clients write with an answer, about its content."""
_MESSAGE_KEYS = ("role", "content", "name", "refusal", "tool_calls", "tool_call_id", *_REASONING)
_MAX_DEPTH = 32


def read_messages(messages: object) -> list[dict[str, Any]]:
    """Normalise messages that have OpenAI's roles and keys only; templates ignore others silently.

    Raises:
      RowError: A message is invalid; the error names its place.
    """
    checked = normalise_messages(messages)
    errors = []
    for index, message in enumerate(checked):
        for key in (key for key in message if key not in _MESSAGE_KEYS):
            error, where = unknown_parameter(key, _MESSAGE_KEYS), f"messages[{index}]"
            errors.append(
                RowError(error.code, f"{where}: {error.message}", f"{where}.{error.param}")
            )
    if errors:
        raise joined(errors)
    for index, message in enumerate(checked):
        where, role = f"messages[{index}]", message["role"]
        if role not in ROLES:
            raise invalid_value(f"{where}.role", f"one of {', '.join(ROLES)}", role)
        if not isinstance(message.get("name", ""), str):
            raise invalid_value(f"{where}.name", "a string", message["name"])
    return checked


def normalise_messages(messages: object) -> list[dict[str, Any]]:
    """Return messages that are checked, with contents and arguments in the form in which they came.

    A call without arguments, whose text is empty, has the arguments `{}`. The reasoning before an
    answer has both names that templates read, as in transformers.

    Raises:
      RowError: A message is invalid; the error names its place.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise invalid_value("messages", "a list of at least one message", messages)
    return [
        _normalise_message(message, f"messages[{index}]") for index, message in enumerate(messages)
    ]


def _normalise_message(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise invalid_value(where, "an object with role and content", message)
    shown = {key: x for key, x in message.items() if key not in _WITHOUT_EFFECT}
    if shown.get("tool_calls") == []:
        del shown["tool_calls"]  # servers write it with every answer
    normalised = normalise_json(_without_null(shown), where)
    if not isinstance(normalised.get("role"), str):
        raise invalid_value(f"{where}.role", "a string", normalised.get("role"))
    if normalised.get("tool_calls"):
        calls = _checked_calls(normalised["tool_calls"], f"{where}.tool_calls")
        normalised["tool_calls"] = calls
    content, has_calls = normalised.get("content"), bool(normalised.get("tool_calls"))
    may_lack = normalised["role"] == "assistant" and has_calls
    if isinstance(content, list):
        _check_parts(content, f"{where}.content")
    elif not isinstance(content, str) and not (content is None and may_lack):
        raise invalid_value(f"{where}.content", "a string or a list of text parts", content)
    return _with_reasoning(normalised, where)


def _with_reasoning(message: dict[str, Any], where: str) -> dict[str, Any]:
    """The message with its reasoning, if it has one, under both names that templates read."""
    written = next((key for key in _REASONING if key in message), None)
    if written is None:
        return message
    reasoning = message[written]
    if not isinstance(reasoning, str):
        raise invalid_value(f"{where}.{written}", "a string", reasoning)
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _without_null(value: Mapping[Any, Any]) -> dict[Any, Any]:
    return {key: x for key, x in value.items() if x is not None}


def _check_parts(parts: list, where: str) -> None:
    if not parts:
        raise invalid_value(where, "at least one part", parts)
    for index, part in enumerate(parts):
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not is_text or not isinstance(part.get("text"), str):
            raise invalid_value(f"{where}[{index}]", '{"type": "text", "text": string}', part)


def _checked_calls(calls: object, where: str) -> list[dict[str, Any]]:
    """Tool calls whose arguments are no wrong JSON; an empty text becomes an empty object."""
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise invalid_value(where, "a list of objects", calls)
    calls = list(map(_without_null, calls))
    for index, call in enumerate(calls):
        if not isinstance(call.get("function"), dict):
            continue
        function = call["function"] = _without_null(call["function"])
        if not isinstance(function.get("arguments"), str):
            continue
        if not function["arguments"].strip():
            function["arguments"] = "{}"
        parsed_arguments(function["arguments"], f"{where}[{index}].function.arguments")
    return calls


def parsed_arguments(text: str, where: str) -> Any:
    """The arguments of a call, from their text in JSON."""
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise invalid_value(where, "a JSON object in a string", text)
    return normalise_json(arguments, where)


def normalise_json(value: object, where: str, depth: int = 0) -> Any:
    """Copy a JSON value into plain lists and dicts, and check that its strings can be encoded.

    `where` is the place of the value in the request, for errors.
    """
    if depth > _MAX_DEPTH:
        param = _param(where)
        raise invalid_request(param, f"expected at most {_MAX_DEPTH} levels, got more.")
    if isinstance(value, str):
        if (error := encoding_error(value, where)) is not None:
            raise RowError(error.code, error.message, _param(where))
        return value
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise invalid_value(where, "string keys", key)
        return {
            normalise_json(key, where, depth): normalise_json(item, f"{where}.{key}", depth + 1)
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray):
        return [normalise_json(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise invalid_value(where, "a JSON value", value)


def iterate_strings(value: object) -> Iterator[str]:
    """Iterate over all strings in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from iterate_strings(item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from iterate_strings(item)


def invalid_value(where: str, expected: str, got: object) -> RowError:
    """The error for a wrong value at a place such as `messages[2].content`."""
    return wrong_value(where, expected, got, _param(where))


def _param(where: str) -> str:
    """The key of the request that a place is in."""
    return where.partition("[")[0].partition(".")[0]
