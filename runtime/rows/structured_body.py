"""Reads the form of answers that the body of a request asks for.

OpenAI's key is `response_format`; vLLM's are `structured_outputs` and, in older versions,
`guided_json`, `guided_regex`, `guided_choice` and `guided_grammar`. Does not know their meaning.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RowError, UserError
from ..parameters.checks import wrong_value
from ..structured.params import StructuredOutputsParams

_MAX_REFERENCES = 8

_GUIDED = {f"guided_{kind}": kind for kind in ("json", "regex", "choice", "grammar")}
FORM_KEYS = ("response_format", "structured_outputs", *_GUIDED)
_SCHEMA_KEYS = ("name", "description", "schema", "strict")
_REFUSED = {
    "structural_tag": "Give json, regex, choice or grammar.",
    "disable_any_whitespace": "Spaces follow colons and commas in every answer.",
    "whitespace_pattern": "Spaces follow colons and commas only.",
}
_WITHOUT_EFFECT = (
    "disable_fallback",
    "disable_additional_properties",
)


def read_form(given: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """The form that a body asks for; None for text.

    Args:
        given: The keys of the body that have a value.

    Raises:
        RowError: A value is wrong, or several keys ask for a form.
    """
    forms = {key: _form(key, given[key]) for key in FORM_KEYS if key in given}
    asked = [key for key, form in forms.items() if form is not None]
    if len(asked) > 1:
        raise wrong_value(asked[1], f"none beside {asked[0]}", "a form")
    return forms[asked[0]] if asked else None


def _form(key: str, value: Any) -> StructuredOutputsParams | None:
    if key == "response_format":
        fields = _response_format(value)
    elif key == "structured_outputs":
        fields = _structured_outputs(value)
    else:
        fields = {_GUIDED[key]: value}
    if fields is None:
        return None
    try:
        return StructuredOutputsParams(**fields)
    except RowError as error:
        is_inside = key == "structured_outputs" and error.param != key
        where = f"{key}.{error.param}" if is_inside else key
        expected = error.message.partition(": ")[2]
        raise RowError(error.code, f"{where}: {expected}", key) from None


def _response_format(value: Any) -> dict[str, Any] | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        expected = "an object with the type text, json_object or json_schema"
        raise wrong_value("response_format", expected, value)
    known = ("type", "json_schema") if kind == "json_schema" else ("type",)
    if unknown := [key for key in value if key not in known]:
        raise wrong_value("response_format", f"the keys {', '.join(known)}", unknown[0])
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    described = value.get("json_schema")
    where = "response_format.json_schema"
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise wrong_value(where, "an object with a schema", described, "response_format")
    for key, content in described.items():
        if key not in _SCHEMA_KEYS:
            expected = f"the keys {', '.join(_SCHEMA_KEYS)}"
            raise wrong_value(where, expected, key, "response_format")
        kind = dict if key == "schema" else bool if key == "strict" else str
        if content is not None and not isinstance(content, kind):
            raise wrong_value(f"{where}.{key}", f"{kind.__name__}", content, "response_format")
    return {"json": described["schema"]}


def _structured_outputs(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_value("structured_outputs", "an object", value)
    known = ("json", "json_object", "regex", "choice", "grammar")
    fields = {key: content for key, content in value.items() if content is not None}
    for key in [*fields]:
        is_off = key == "disable_any_whitespace" and fields[key] is False
        if key in _WITHOUT_EFFECT or is_off:
            del fields[key]
        elif key in _REFUSED:
            message = f"structured_outputs.{key} is not supported here. {_REFUSED[key]}"
            raise RowError("unknown_parameter", message, "structured_outputs")
        elif key not in known:
            expected = f"the keys {', '.join(known)}"
            raise wrong_value("structured_outputs", expected, key)
    return fields


def read_form_file(path: Path) -> dict[str, Any]:
    """The keys of a request's body that ask for the form in a file, that of `--form`.

    A file has a JSON Schema, or an object with one key with which a row asks for a form, such as
    `{"guided_choice": ["yes", "no"]}`. A file that ends in `.gbnf` has a grammar.

    Raises:
        ConfigError: The file cannot be read, or has no form.
    """
    try:
        text = path.read_text("utf-8")
        form = (
            {"guided_grammar": text} if path.suffix == ".gbnf" else _keys_of_form(json.loads(text))
        )
        if read_form(form) is None:
            raise UserError("the form text, which asks for nothing")
    except OSError as error:
        raise ConfigError(
            f"--form {path}: expected a file that can be read, got none ({error.strerror}). Check "
            "the path."
        ) from None
    except RowError as error:
        raise ConfigError(f"--form {path}: {error.message}") from None
    except ValueError as error:
        raise ConfigError(
            f"--form {path}: expected a JSON Schema, an object with one of {', '.join(FORM_KEYS)}, "
            f"or a grammar (.gbnf), got {error}."
        ) from None
    return form


def field_names(form: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys of answers that have a form, in their order; none if answers are no objects.

    Args:
        form: The keys of a request's body that ask for the form.
    """
    asked = read_form(form)
    root = json.loads(asked.json) if asked is not None and isinstance(asked.json, str) else {}
    schema = root
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, dict) or not isinstance(ref := schema.get("$ref"), str):
            break
        schema = root
        for name in ref.split("/")[1:]:
            schema = schema.get(name) if isinstance(schema, dict) else None
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return tuple(properties) if isinstance(properties, dict) else ()


def _keys_of_form(value: Any) -> dict[str, Any]:
    keys = [key for key in FORM_KEYS if isinstance(value, dict) and key in value]
    if keys and len(value) > 1:
        raise UserError(f"the keys {', '.join(value)}")
    return value if keys else {"structured_outputs": {"json": value}}
