"""Tools of a chat request: what a body offers, the form of forced calls, and calls in answers.

A tool that must be called is a form of the answer (`structured`): the arguments of a named tool, or
a list of calls. Calls that the model is free to make are found in its text, in the two usual
notations: `<tool_call>{...}</tool_call>`, or an answer that is one JSON object. Does not know about
templates, tokens or output lines.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

from ..errors import UserError, invalid_request
from ..parameters.checks import wrong_value
from ..structured.params import StructuredOutputsParams
from .body_keys import switch

TOOL_KEYS = ("tools", "tool_choice", "parallel_tool_calls")
_FUNCTION_KEYS = ("name", "description", "parameters", "strict")
_CHOICES = ("none", "auto", "required")
_NAME = re.compile("[A-Za-z0-9_.-]{1,64}")
_TAGGED = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)
_NOT_SPACE = re.compile(r"[^ \t\n\r]")
_NO_ARGUMENTS = {"type": "object", "properties": {}}


class ToolCall(NamedTuple):
    """One call: the name of the tool, and its arguments in JSON, as they were generated."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Tools:
    """The tools of a request, and the calls that it asks for."""

    tools: tuple[dict[str, Any], ...]
    """As in the body, for the chat template."""
    choice: str = "auto"
    """`none`, `auto`, `required` or `named`."""
    name: str = ""
    """The tool that must be called, if the choice is `named`."""
    is_parallel: bool = True
    """Whether an answer may have several calls."""

    def form(self) -> StructuredOutputsParams | None:
        """The form of an answer that must be a call; None if the model is free."""
        if self.choice == "named":
            (function,) = (f for f in self._functions if f["name"] == self.name)
            return StructuredOutputsParams(json=_parameters(function))
        if self.choice != "required":
            return None
        calls = []
        for index, function in enumerate(self._functions):
            place = f"#/items/anyOf/{index}/properties/parameters"
            parameters = _moved(_parameters(function), place)
            properties = {"name": {"const": function["name"]}, "parameters": parameters}
            calls.append(
                {"type": "object", "properties": properties, "required": ["name", "parameters"]}
            )
        schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
        return StructuredOutputsParams(
            json=schema if self.is_parallel else schema | {"maxItems": 1}
        )

    def read(self, text: str) -> tuple[str | None, list[ToolCall]]:
        """The content of an answer without its calls, and the calls."""
        if self.choice == "named":
            return None, [ToolCall(self.name, text)]
        if self.choice == "none":
            return text, []
        tagged = _TAGGED.findall(text)
        pieces = [_calls(piece) for piece in tagged or [text]]
        calls = [call for piece in pieces for call in piece]
        if not all(pieces) or any(call.name not in self._names for call in calls):
            return text, []
        calls = calls if self.is_parallel else calls[:1]
        content = _TAGGED.sub("", text).strip() if tagged else ""
        return content or None, calls

    @property
    def _functions(self) -> list[dict[str, Any]]:
        return [tool["function"] for tool in self.tools]

    @property
    def _names(self) -> set[str]:
        return {function["name"] for function in self._functions}


def read_tools(given: Mapping[str, Any]) -> Tools | None:
    """The tools of a body; None if it has none.

    Args:
        given: The keys of the body that have a value.

    Raises:
        RowError: A value is wrong.
    """
    if "tools" not in given:
        for key, harmless in (("tool_choice", "none"), ("parallel_tool_calls", True)):
            if given.get(key, harmless) != harmless:
                raise invalid_request(key, "expected tools beside it, got none.")
        return None
    value = given["tools"]
    if not isinstance(value, list) or not value:
        raise wrong_value("tools", "a list of tools that is not empty", value)
    for index, tool in enumerate(value):
        _check_tool(tool, f"tools[{index}]")
    tools = Tools(tuple(value))
    if len(tools._names) < len(value):
        raise wrong_value("tools", "tools of different names", "one name twice")
    is_parallel = switch(given, "parallel_tool_calls", default=True)
    return _with_choice(replace(tools, is_parallel=is_parallel), given.get("tool_choice", "auto"))


def _with_choice(tools: Tools, choice: Any) -> Tools:
    if isinstance(choice, str) and choice in _CHOICES:
        return replace(tools, choice=choice)
    given = choice if isinstance(choice, dict) else {}
    named = given.get("function")
    if not isinstance(named, dict) or given.get("type") != "function":
        expected = f"{', '.join(_CHOICES)}, or an object that names a function"
        raise wrong_value("tool_choice", expected, choice)
    name = named.get("name")
    if not isinstance(name, str) or name not in tools._names:
        raise wrong_value("tool_choice", "the name of one of the tools", name)
    return replace(tools, choice="named", name=name)


def _check_tool(tool: Any, where: str) -> None:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function" or len(tool) > 2:
        raise wrong_value(where, "an object with the type function and a function", tool, "tools")
    if unknown := [key for key in function if key not in _FUNCTION_KEYS]:
        raise wrong_value(f"{where}.function", ", ".join(_FUNCTION_KEYS), unknown[0], "tools")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        expected = "1 to 64 letters, digits, underscores, dots and dashes"
        raise wrong_value(f"{where}.function.name", expected, name, "tools")
    if parameters is not None and not isinstance(parameters, dict):
        raise wrong_value(f"{where}.function.parameters", "a JSON Schema", parameters, "tools")
    if parameters and parameters.get("type", "object") != "object":
        place = f"{where}.function.parameters.type"
        raise wrong_value(place, "object, as arguments have names", parameters["type"], "tools")


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    return function.get("parameters") or _NO_ARGUMENTS


def _moved(schema: Any, place: str) -> Any:
    """The schema for use at a place inside a larger schema: its references begin with the place."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: f"{place}{value[1:]}"
        if key == "$ref" and isinstance(value, str) and value[:1] == "#"
        else _moved(value, place)
        for key, value in schema.items()
    }


def _calls(text: str) -> list[ToolCall]:
    """The calls in a JSON object, or in a list of them; empty for other texts."""
    try:
        value = _DECODER.decode(text)
        return [_call(item) for item in (_parts(text) if isinstance(value, list) else [text])]
    except (ValueError, KeyError, RecursionError):
        return []


def _call(text: str) -> ToolCall:
    """The call in valid JSON; raises ValueError or KeyError if it is none."""
    parts = list(_parts(text)) if text.lstrip().startswith("{") else []
    members = dict(zip(map(json.loads, parts[::2]), parts[1::2], strict=True))
    name = json.loads(members["name"])
    # numbers that are read and written again could lose digits
    arguments = members["arguments"] if "arguments" in members else members["parameters"]
    if not isinstance(name, str) or not arguments.startswith("{"):
        raise UserError(text)
    return ToolCall(name, arguments)


def _parts(text: str) -> Iterator[str]:
    """The items of an array in valid JSON, or the keys and values of an object, as written."""
    start = _after_space(text, _after_space(text, 0) + 1)
    while text[start] not in "]}":
        end = _DECODER.raw_decode(text, start)[1]
        yield text[start:end]
        start = _after_space(text, end)
        if text[start] in ",:":
            start = _after_space(text, start + 1)


def _after_space(text: str, start: int) -> int:
    found = _NOT_SPACE.search(text, start)
    return found.start() if found else len(text)


def _refuse_constant(literal: str) -> NoReturn:
    raise UserError(f"expected JSON, got {literal}")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
