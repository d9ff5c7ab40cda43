"""Reads one line of a batch file into one row: a request to run, or an error row.

Lines have one of two forms. An OpenAI Batch line has `custom_id`, `method`, `url` and `body`. A
simple line is the body alone, `{"prompt": ...}`, `{"messages": ...}` or `{"input": ...}`, with an
optional `id` or `custom_id`; an integer `id` is read as its digits. Without an id the row is called
`row-<n>`, with n counted from zero over the rows of the file.

Does not know about files, tokenizers or buckets. Guarantees: every line gives exactly one row, and
no content of a line raises an exception; equal requests have equal hashes, whatever the order or
spacing of their keys and the spelling of their urls, except in tools and forms of answers.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from ..errors import RowError, invalid_request, joined, unknown_parameter
from ..files.strict_json import MAX_LINE_BYTES, Line, Unit, dump_line, parse_object
from ..parameters.checks import wrong_value
from ..request import SamplingParams
from ..text.chat_messages import read_messages
from .body_keys import check_ids, unknown_among
from .pooled_body import (
    EMBEDDING_URL,
    POOLED_KEYS,
    POOLED_OTHERS,
    POOLED_URLS,
    PooledRequest,
    read_pooled,
)
from .request_body import BodyParams, key_tables, read_params

CHAT_URL = "/v1/chat/completions"
COMPLETION_URL = "/v1/completions"

_SIMPLE_URLS = {"prompt": COMPLETION_URL, "messages": CHAT_URL, "input": EMBEDDING_URL}
"""The endpoint of a simple line, by the key that it has."""
_ENVELOPE = ("custom_id", "method", "url", "body")
_URLS = (CHAT_URL, COMPLETION_URL, *POOLED_URLS)
_NOT_PATH = re.compile(r"^https?://[^/]*|[?#].*$", re.DOTALL)
_WRITTEN_ID = re.compile(rb'[\s\x1e]*\{\s*"(?:custom_id|id)"\s*:\s*("(?:[^"\\]|\\.)+")')
"""The beginning of a line whose first key is its id."""


@dataclass(frozen=True, slots=True)
class PlacedRow:
    """A row of the input and its place; `custom_id` is None if it could not be read."""

    row: int
    line_number: int
    offset: int
    custom_id: str | None
    request_hash: str
    unit: Unit = field(default="line", kw_only=True)

    @property
    def place(self) -> str:
        """The place of the row in its file, for people."""
        return f"{self.unit} {self.line_number}"

    def failed(self, error: RowError) -> "BadRow":
        """The error row that the row becomes."""
        return BadRow(
            self.row, self.line_number, self.offset, self.custom_id, self.request_hash, error,
            unit=self.unit,
        )  # fmt: skip


Row = TypeVar("Row", bound=PlacedRow)


@dataclass(frozen=True)
class RequestRules:
    """The rules by which a job reads its requests."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Sampling parameters for keys that a request leaves out."""
    ignores_unknown: bool = False
    """Whether unknown keys of the body are ignored."""
    models: Mapping[str, str | None] | None = None
    """The adapter that each `model` means, None for the model itself. Without it, every name means
    the model itself."""
    on_error: Literal["row", "raise"] = "row"
    """Whether a request in error becomes an error row, or ends the job."""


PLAIN = RequestRules()


@dataclass(frozen=True)
class BatchRow(PlacedRow, BodyParams):
    """A request as written in its line, before tokenizing."""

    custom_id: str
    kind: Literal["chat", "completion", "score", "pooled"]
    model: str | None = None
    adapter: str | None = None
    """The adapter that `model` names; None for the model itself."""
    messages: list[dict[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    ignored: tuple[str, ...] = ()
    """The unknown keys of the body, which were ignored."""
    pooled: PooledRequest | None = None
    """The texts to embed, to compare or to classify; None for other requests."""


@dataclass(frozen=True)
class BadRow(PlacedRow):
    """A line that ends as an error row."""

    error: RowError

    def __str__(self) -> str:
        """The error, after the place of its line; some errors already begin with the place."""
        message, place = str(self.error), f"{self.place}: "
        return message if message.startswith(place) else place + message


def read_row(line: Line, row: int, rules: RequestRules = PLAIN) -> BatchRow | BadRow:
    """Read one line.

    Args:
        line: The line, at most `MAX_LINE_BYTES` long.
        row: Index of the row, counted from zero over the lines that are not blank.
        rules: The rules of the job.
    """
    custom_id = None
    try:
        record = record_of(line)
        custom_id = custom_id_of(record, row, is_simple=_is_simple(record))
        url, body = request_of(record)
        request_hash = hash_request(url, body)
        ignored = _unknown_keys(url, body) if rules.ignores_unknown else ()
        known = {key: body[key] for key in body if key not in ignored}
        content = _read_body(url, known, rules.defaults)
        content["adapter"] = _adapter(content["model"], rules.models)
        if (form := content["params"].structured_outputs) is not None:
            # the order of keys in a schema decides the answer
            request_hash = hashlib.sha256(f"{request_hash} {form.fingerprint}".encode()).hexdigest()
        if (tools := content.get("tools")) is not None:
            # templates show the keys of tools in their order
            shown = request_hash.encode() + dump_line(tools.tools)
            request_hash = hashlib.sha256(shown).hexdigest()
    except RowError as error:
        if custom_id is None:
            message = f"{line.place}: {error.message}"
            error = RowError(error.code, message, error.param)
            custom_id = written_id(line.content or b"")
        line_hash = hashlib.sha256(line.content or b"").hexdigest()
        return BadRow(row, line.number, line.offset, custom_id, line_hash, error, unit=line.unit)
    return BatchRow(
        row=row,
        line_number=line.number,
        offset=line.offset,
        custom_id=custom_id,
        request_hash=request_hash,
        ignored=ignored,
        unit=line.unit,
        **content,
    )


def record_of(line: Line) -> dict[str, Any]:
    """The object of a line; RowError if it is too long or has none."""
    if line.content is None:
        raise RowError(
            "invalid_line", f"expected at most {MAX_LINE_BYTES} bytes in a line, got more."
        )
    return parse_object(line.content)


def with_unique_ids(rows: Iterable[Row]) -> Iterator[Row | BadRow]:
    """Rows in order, of which later ones with the custom_id of an earlier one are errors."""
    first_lines: dict[str | None, int] = {}
    for row in rows:
        first = first_lines.setdefault(row.custom_id, row.line_number)
        if row.custom_id is None or first == row.line_number:
            yield row
            continue
        error = RowError(
            "duplicate_custom_id",
            f"{row.place}: expected a new custom_id, got {row.custom_id[:100]!r}, the id of "
            f"{row.unit} {first}, which keeps it. Give each its own.",
            "custom_id",
        )
        yield row.failed(error)


def hash_request(url: str, body: Mapping[str, Any]) -> str:
    """The SHA-256 of a request with its keys sorted at every level."""
    canonical = {"method": "POST", "url": url, "body": body}
    return hashlib.sha256(dump_line(canonical, sort_keys=True)).hexdigest()


def _is_simple(record: Mapping[str, Any]) -> bool:
    return not any(key in record for key in ("method", "url", "body"))


def custom_id_of(record: Mapping[str, Any], row: int, *, is_simple: bool) -> str:
    """The id of a line; a simple line may have it in `id`, or none.

    Raises:
        RowError: The line has no id, or an invalid one.
    """
    names = ("custom_id", "id") if is_simple else ("custom_id",)
    present = [name for name in names if record.get(name) is not None]
    if len(present) == 2:
        raise RowError("missing_custom_id", "expected custom_id or id, got both.", "id")
    if not present:
        if is_simple:
            return f"row-{row}"
        raise RowError("missing_custom_id", "expected a custom_id, got none.", "custom_id")
    value = record[present[0]]
    # exported tables number their rows; bool is an int in Python, but true is no number
    if present[0] == "id" and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) or not value:
        shown = repr(value)[:100]
        or_integer = ", or an integer" if present[0] == "id" else ""
        raise RowError(
            "missing_custom_id",
            f"{present[0]}: expected a string that is not empty{or_integer}, got {shown}.",
            present[0],
        )
    return value


def written_id(content: bytes) -> str | None:
    """The id at the beginning of a line that cannot be read; None if none is there."""
    if (found := _WRITTEN_ID.match(content)) is None:
        return None
    try:
        custom_id = json.loads(found[1].decode())
        custom_id.encode()
    except ValueError:
        return None
    return custom_id


def request_of(record: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """The endpoint and the body of a line of either form.

    Raises:
        RowError: The line is no request.
    """
    if _is_simple(record):
        body = {key: record[key] for key in record if key not in ("custom_id", "id")}
        keys = [key for key in _SIMPLE_URLS if key in body]
        if len(keys) == 1:
            return _SIMPLE_URLS[keys[0]], body
        raise RowError(
            "invalid_line",
            f"expected an OpenAI Batch line ({', '.join(_ENVELOPE)}) or an object with one of "
            f"prompt, messages and input, got the keys "
            f"{', '.join(map(repr, record))[:200] or 'none'}.",
        )
    if unknown := [key for key in record if key not in _ENVELOPE]:
        raise joined([unknown_parameter(key, _ENVELOPE) for key in unknown])
    if str(record.get("method")).upper() != "POST":
        raise wrong_value("method", "'POST'", record.get("method"))
    url = endpoint_of(record.get("url"))
    body = record.get("body")
    if not isinstance(body, dict):
        raise wrong_value("body", "an object", body)
    return url, body


def endpoint_of(url: object) -> str:
    """The endpoint that a url names; services write it with a host, a last slash or without /v1.

    Raises:
        RowError: It names no endpoint.
    """
    if isinstance(url, str):
        path = _NOT_PATH.sub("", url).rstrip("/")
        for endpoint in (path, "/v1/" + path.rpartition("/v1/")[2].lstrip("/")):
            if endpoint in _URLS:
                return endpoint
    expected = f"expected {CHAT_URL}, {COMPLETION_URL} or {', '.join(POOLED_URLS)}"
    raise RowError("unsupported_url", f"url: {expected}, got {str(url)[:100]!r}.", "url")


def _read_body(url: str, body: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    if (task := POOLED_URLS.get(url)) is not None:
        if "structured_outputs" in defaults:
            raise wrong_value("url", "a chat or a completion beside --form", url)
        params = SamplingParams(max_tokens=0, temperature=0, prompt_logprobs=0)
        pooled = read_pooled(task, body)
        return {"kind": "pooled", "params": params, "model": _model(body), "pooled": pooled}
    is_chat = url == CHAT_URL
    asked = read_params(body, is_chat=is_chat, defaults=defaults)
    content: dict[str, Any] = {**vars(asked), "model": _model(body)}
    if is_chat:
        content["kind"] = "chat"
        content["messages"] = read_messages(body.get("messages"))
        kwargs = body.get("chat_template_kwargs")
        if not isinstance(kwargs, dict | None):
            raise wrong_value("chat_template_kwargs", "an object", kwargs)
        content["chat_template_kwargs"] = kwargs or {}
        return content
    content["kind"] = "score" if asked.params.max_tokens == 0 else "completion"
    prompt = _prompt(body.get("prompt"))
    content["prompt" if isinstance(prompt, str) else "prompt_token_ids"] = prompt
    return content


def _unknown_keys(url: str, body: Mapping[str, Any]) -> tuple[str, ...]:
    task = POOLED_URLS.get(url)
    tables = key_tables(url == CHAT_URL) if task is None else (POOLED_KEYS[task], POOLED_OTHERS)
    return unknown_among(body, *tables)


def _model(body: Mapping[str, Any]) -> str | None:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise wrong_value("model", "a string", model)
    return model


def _adapter(model: str | None, models: Mapping[str, str | None] | None) -> str | None:
    if model is None or models is None:
        return None
    if model not in models:
        # refused, as a row with an unknown name of an adapter would be answered by the model itself
        raise wrong_value("model", f"one of {', '.join(models)}", model)
    return models[model]


def _prompt(prompt: object) -> str | list[int]:
    if prompt in ("", []):
        raise RowError("empty_prompt", "prompt: expected text or token ids, got none.", "prompt")
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        raise wrong_value("prompt", "a string or a list of token ids", prompt)
    if any(isinstance(item, str | list) for item in prompt):
        raise invalid_request(
            "prompt", "expected one prompt, got a list of prompts. Write one line for each."
        )
    check_ids("prompt", prompt, "prompt")
    return prompt
