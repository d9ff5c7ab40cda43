"""Reads the file of `--form`, the form of the answers of all rows that ask for none.

A file has a JSON Schema, or an object with one key with which a row asks for a form, such as
`{"guided_choice": ["yes", "no"]}`. A file that ends in `.gbnf` has a grammar. Does not know the
meaning of forms.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RowError
from .structured_body import FORM_KEYS, read_form

_MAX_REFERENCES = 8


def read_form_file(path: Path) -> dict[str, Any]:
    """The keys of a request's body that ask for the form in a file.

    Raises:
        ConfigError: The file cannot be read, or has no form.
    """
    try:
        text = path.read_text("utf-8")
        form = {"guided_grammar": text} if path.suffix == ".gbnf" else _form(json.loads(text))
        if read_form(form) is None:
            raise ValueError("the form text, which asks for nothing")
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


def _form(value: Any) -> dict[str, Any]:
    keys = [key for key in FORM_KEYS if isinstance(value, dict) and key in value]
    if keys and len(value) > 1:
        raise ValueError(f"the keys {', '.join(value)}")
    return value if keys else {"structured_outputs": {"json": value}}
