"""Reads the file of a pipeline: its stages, each with a name and a template of its requests.

The file has a table `[[stages]]` for each stage. Its keys are `name`, `max_prompt_tokens` and those
of a request's body. The contents of `messages`, or the `prompt`, are templates; the other keys are
taken as they are. If a stage has neither of the two, its request is the row itself.

Does not know how templates are rendered or how rows run.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RowError
from ..files.run_config import read_toml
from ..rows.lines import CHAT_URL, COMPLETION_URL
from ..rows.request_body import read_params
from ..rows.structured_body import FORM_KEYS
from ..text.chat_messages import ROLES

ROW = "row"
"""The name of the input row in templates."""
MAX_STAGES = 32
_NAME = re.compile(r"[a-z][a-z0-9_]{0,39}")
_RESERVED = frozenset(
    {ROW, "loop", "range", "dict", "cycler", "joiner", "namespace", "raise_exception", "self"}
    | {"true", "false", "none", "and", "or", "not", "in", "is", "if", "else"}
)
"""Names that have a meaning in every template."""


@dataclass(frozen=True)
class Stage:
    """One stage: the requests that it asks, one for each row."""

    name: str
    templates: Mapping[str, str]
    """The source of each template by its place in the body, such as `messages[0].content`."""
    roles: Sequence[str] = ()
    """The roles of the messages; empty for a prompt, or for requests that are the rows."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """The other keys of the body."""
    max_prompt_tokens: int | None = None
    """The longest prompt to plan for; None to derive it."""

    @property
    def url(self) -> str:
        """The endpoint of a stage with templates."""
        return CHAT_URL if self.roles else COMPLETION_URL

    @property
    def max_tokens(self) -> int | None:
        """The longest answer; None if the stage does not limit it."""
        limit = self.fields.get("max_completion_tokens")
        return self.fields.get("max_tokens") if limit is None else limit

    def body(self, texts: Sequence[str]) -> dict[str, Any]:
        """The body of a request, from the rendered templates in their order."""
        if self.roles:
            pairs = zip(self.roles, texts, strict=True)
            messages = [{"role": role, "content": text} for role, text in pairs]
            return {"messages": messages, **self.fields}
        (prompt,) = texts
        return {"prompt": prompt, **self.fields}


@dataclass(frozen=True)
class Pipeline:
    """The stages of a job, in the order in which they run."""

    path: Path
    stages: tuple[Stage, ...]
    text: str
    """The content of the file as canonical JSON, which decides the answers."""


def read_pipeline(path: Path, form: Mapping[str, Any] | None = None) -> Pipeline:
    """Read the file of a pipeline.

    Args:
        path: The file.
        form: The keys of a body that ask for the form of the last stage's answers; None for those
            of the file.

    Raises:
        ConfigError: The file cannot be read, or a key of it is unknown or invalid.
    """
    table = read_toml(path)
    pipeline = pipeline_from(path, table)
    if form is None:
        return pipeline
    last = pipeline.stages[-1]
    if given := [key for key in FORM_KEYS if key in last.fields]:
        raise wrong_key(path, last.name, given[0], "none beside --form", last.fields[given[0]])
    return pipeline_from(path, {"stages": [*table["stages"][:-1], {**table["stages"][-1], **form}]})


def pipeline_from(path: Path, table: Mapping[str, Any]) -> Pipeline:
    """The pipeline in the table of a file; raises ConfigError."""
    given = table.get("stages")
    given = given if isinstance(given, list) else []
    are_tables = all(isinstance(stage, dict) for stage in given)
    if set(table) != {"stages"} or not are_tables or not 1 <= len(given) <= MAX_STAGES:
        raise ConfigError(
            f"{path}: expected 1 to {MAX_STAGES} tables [[stages]] and nothing else, got the keys "
            f"{', '.join(table) or 'none'}."
        )
    stages: list[Stage] = []
    for number, stage_table in enumerate(given, start=1):
        stages.append(_read_stage(path, number, stage_table, {stage.name for stage in stages}))
    try:
        # in the order of the file, which decides the answers in schemas and tools
        text = json.dumps(table, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{path}: expected values that JSON has, without dates, inf and nan, got: {error}."
        ) from None
    return Pipeline(path, tuple(stages), text)


def wrong_key(path: Path, stage: str, key: str, expected: str, got: object) -> ConfigError:
    """The error for a wrong key of a stage."""
    shown = "none" if got is None else repr(got)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
    return ConfigError(f"{path}: stage {stage}: {key}: expected {expected}, got {shown}.")


def _read_stage(path: Path, number: int, table: Mapping[str, Any], earlier: set[str]) -> Stage:
    fields = dict(table)
    name, max_prompt_tokens = fields.pop("name", None), fields.pop("max_prompt_tokens", None)
    is_name = isinstance(name, str) and _NAME.fullmatch(name) is not None
    if not is_name or name in _RESERVED or name in earlier:
        expected = "a name of its own, of small letters, digits and _, that templates can use"
        raise wrong_key(path, str(number), "name", expected, name)
    is_count = isinstance(max_prompt_tokens, int) and not isinstance(max_prompt_tokens, bool)
    if max_prompt_tokens is not None and (not is_count or max_prompt_tokens < 1):
        expected = "a number of tokens from 1"
        raise wrong_key(path, name, "max_prompt_tokens", expected, max_prompt_tokens)
    if {"messages", "prompt"} <= set(fields):
        raise wrong_key(path, name, "prompt", "none beside messages", fields["prompt"])
    templates, roles = {}, []
    if "messages" in fields:
        messages = fields.pop("messages")
        if not isinstance(messages, list) or not messages:
            raise wrong_key(path, name, "messages", "a list of at least one message", messages)
        for index, message in enumerate(messages):
            roles.append(_role(path, name, index, message))
            templates[f"messages[{index}].content"] = message["content"]
    elif "prompt" in fields:
        templates["prompt"] = fields.pop("prompt")
        if not isinstance(templates["prompt"], str):
            raise wrong_key(path, name, "prompt", "a text", templates["prompt"])
    stage = Stage(name, templates, tuple(roles), fields, max_prompt_tokens)
    _check_fields(path, stage)
    return stage


def _role(path: Path, stage: str, index: int, message: Any) -> str:
    is_table = isinstance(message, dict) and set(message) == {"role", "content"}
    if not is_table or not isinstance(message["content"], str):
        expected = "a table with role and a content of text"
        raise wrong_key(path, stage, f"messages[{index}]", expected, message)
    if message["role"] not in ROLES:
        expected = f"one of {', '.join(ROLES)}"
        raise wrong_key(path, stage, f"messages[{index}].role", expected, message["role"])
    return message["role"]


def _check_fields(path: Path, stage: Stage) -> None:
    """Refuse keys that no request of the stage can have."""
    # requests that are the rows may go to either endpoint
    endpoints = [bool(stage.roles)] if stage.templates else [True, False]
    errors = []
    for is_chat in endpoints:
        try:
            read_params(stage.fields, is_chat=is_chat, defaults={})
        except RowError as error:
            errors.append(error)
    if len(errors) == len(endpoints):
        raise ConfigError(f"{path}: stage {stage.name}: {errors[0].message}")
