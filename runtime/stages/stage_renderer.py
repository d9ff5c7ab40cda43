"""Renders the requests of a stage from rows and the answers of earlier stages.

A template sees the row of the input as `row`, and each earlier stage by its name: `draft.answer` is
the text of its first answer, `draft.answers` are the texts of all its answers. The filter
`from_json` gives the fields of an answer in JSON. The templates run in
a sandbox with limits (`template_process`), one process for each. In a job with adapters, the
request of a row keeps the `model` of the row, which names its adapter.

Does not know about files or tokens. Guarantees: a request or a `RowError` for each row.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from itertools import chain
from typing import Any

from ..errors import RowError
from ..files.strict_json import dump_line
from ..request import MAX_N
from ..rows.lines import request_of
from ..rows.pooled_body import POOLED_URLS
from ..text.template_process import TemplateFailure, TemplateLimits, TemplateProcess
from .pipeline_file import ROW, Pipeline, Stage, wrong_key

_LIMITS = ("max_tokens", "max_completion_tokens")
"""The keys of a body that limit its answers."""
CHUNK_ROWS = 256
"""The number of rows that are rendered at once."""
Context = Mapping[str, Any]
"""The variables of templates: the row, and a table of answers for each earlier stage."""


def answers_table(texts: Sequence[str]) -> dict[str, Any]:
    """The variable of a stage with these answers."""
    return {"answer": texts[0], "answers": list(texts)}


def calls_text(calls: Iterable[tuple[str, str]]) -> str:
    """The text of tool calls, from their names and their arguments in JSON, as a list in JSON."""
    # arguments are shown as they were generated: escapes in a string would need more tokens
    shown = [f'{{"name": {json.dumps(name)}, "arguments": {text}}}' for name, text in calls]
    return f"[{', '.join(shown)}]"


class StageRenderer:
    """Renders the requests of one stage; close it.

    Args:
        stage: The stage.
        keeps_model: Whether requests keep the `model` of their rows.
    """

    def __init__(self, stage: Stage, *, keeps_model: bool = False):
        self.stage = stage
        self._keeps_model = keeps_model
        self.is_read = False
        """Whether a later stage reads the answers, which must then have a largest length."""
        self._processes = {
            place: TemplateProcess(source, TemplateLimits(), None, is_strict=True)
            for place, source in stage.templates.items()
        }

    def variables(self, place: str) -> frozenset[str]:
        """The names that the template at a place of the body reads; raises TemplateFailure."""
        return self._processes[place].variables()

    def keys_of_rows(self, place: str) -> frozenset[str]:
        """The keys of rows that the template at a place of the body writes for every row.

        Keys inside blocks, and keys with a filter such as `default`, are not among them.
        """
        import jinja2.nodes

        environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
        tree = environment.parse(self.stage.templates[place])
        if any((n.name, n.ctx) == (ROW, "store") for n in tree.find_all(jinja2.nodes.Name)):
            return frozenset()  # the template gives the name to another value
        written = (node.nodes for node in tree.body if isinstance(node, jinja2.nodes.Output))
        names = map(_key_of_row, chain.from_iterable(written))
        return frozenset(name for name in names if name is not None)

    def render(
        self, contexts: Sequence[Context], *, is_measured: bool = False
    ) -> list[tuple[str, dict[str, Any]] | RowError]:
        """The endpoint and the body of the request for each context, or its error.

        `is_measured` says that placeholders stand for the answers.
        """
        if not self._processes:
            return [self._own_request(context[ROW]) for context in contexts]
        rendered = {
            place: process.render(contexts, is_measured=is_measured)
            for place, process in self._processes.items()
        }
        return [
            self._request(context[ROW], {place: texts[i] for place, texts in rendered.items()})
            for i, context in enumerate(contexts)
        ]

    def _request(
        self, row: Mapping[str, Any], texts: Mapping[str, str | TemplateFailure]
    ) -> tuple[str, dict[str, Any]] | RowError:
        for place, text in texts.items():
            if isinstance(text, TemplateFailure):
                reason = str(text).rstrip(".")
                message = f"stage {self.stage.name}, {place}: the template failed: {reason}. "
                message += "Change the row, or the template in the pipeline's file."
                return RowError("template_error", message, place)
        kept = {"model": row["model"]} if self._keeps_model and "model" in row else {}
        return self.stage.url, {**kept, **self.stage.body([str(text) for text in texts.values()])}

    def _own_request(self, row: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | RowError:
        """The request that is the row itself, with the keys of the stage."""
        request = {key: value for key, value in row.items() if key not in ("custom_id", "id")}
        try:
            url, body = request_of(request)
            if url in POOLED_URLS:
                raise RowError(
                    "unsupported_url", f"url: expected a chat or a completion, got {url}.", "url"
                )
        except RowError as error:
            message = f"stage {self.stage.name} has no template, and the row is no request: "
            return RowError(error.code, message + error.message, error.param)
        if self.is_read and body.get("echo") and "echo" not in self.stage.fields:
            message = f"stage {self.stage.name}: echo: expected false, as a later stage reads the "
            message += "answers, got true. Remove it, or set echo = false in the stage."
            return RowError("invalid_request", message, "echo")
        # either key of the stage replaces both keys of the row
        replaced = _LIMITS if any(key in self.stage.fields for key in _LIMITS) else ()
        kept = {key: value for key, value in body.items() if key not in replaced}
        return url, {**kept, **self.stage.fields}

    def placeholders(self, row: Mapping[str, Any], mark: str) -> list[str]:
        """Texts in place of the answers to a row's request, with a mark for what is generated.

        There are as many texts as the request can have answers. A part of an answer that the model
        does not generate, such as the name of a tool that must be called, is in its text.
        """
        body = self.stage.fields
        if not self._processes:
            request = self._own_request(row)
            body = {} if isinstance(request, RowError) else request[1]
        n, choice = body.get("n"), body.get("tool_choice")
        named = choice.get("function") if isinstance(choice, dict) else None
        name = named.get("name") if isinstance(named, dict) else None
        text = calls_text([(name, mark)]) if isinstance(name, str) else mark
        # the stage refuses requests with other values
        return [text] * (n if isinstance(n, int) and 1 <= n <= MAX_N else 1)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes.values():
            process.close()


def open_renderers(
    pipeline: Pipeline, files: ExitStack, *, keeps_model: bool = False
) -> list[StageRenderer]:
    """The renderers of all stages, whose templates are compiled and read known names only.

    Args:
        pipeline: The stages.
        files: Closes the renderers.
        keeps_model: Whether requests keep the `model` of their rows.

    Raises:
        ConfigError: A template is wrong, or reads answers whose lengths are not limited.
    """
    renderers = [
        files.enter_context(closing(StageRenderer(stage, keeps_model=keeps_model)))
        for stage in pipeline.stages
    ]
    earlier: dict[str, StageRenderer] = {}
    for renderer in renderers:
        _connect(pipeline, renderer, earlier)
        earlier[renderer.stage.name] = renderer
    return renderers


def _connect(
    pipeline: Pipeline, renderer: StageRenderer, earlier: Mapping[str, StageRenderer]
) -> None:
    """Check the templates of a stage, and mark the earlier stages whose answers they read."""
    name = renderer.stage.name
    for place, source in renderer.stage.templates.items():
        try:
            names = renderer.variables(place)
        except TemplateFailure as failure:
            expected = f"a template, which fails with {failure}"
            raise wrong_key(pipeline.path, name, place, expected, source) from None
        if unknown := names - {ROW, *earlier}:
            expected = f"a template that reads {', '.join([ROW, *earlier])} only"
            raise wrong_key(pipeline.path, name, place, expected, min(unknown))
        for read in sorted(names - {ROW}):
            _check_answers(pipeline, earlier[read].stage, name)
            earlier[read].is_read = True


def check_columns(pipeline: Pipeline, renderers: Sequence[StageRenderer], table: Mapping) -> None:
    """Check that a table has the columns that templates write for every row.

    Args:
        pipeline: The stages.
        renderers: The renderers of all stages.
        table: A row of the table, which has all of its columns.

    Raises:
        ConfigError: A column is missing.
    """
    for renderer in renderers:
        for place in renderer.stage.templates:
            if missing := sorted(renderer.keys_of_rows(place) - set(table)):
                expected = f"columns of the table ({', '.join(table)})"
                raise wrong_key(
                    pipeline.path, renderer.stage.name, place, expected, f"{ROW}.{missing[0]}"
                )


def _key_of_row(node: Any) -> str | None:
    """The key in an expression `row.key` or `row['key']`; None for other expressions."""
    import jinja2.nodes as nodes

    if not isinstance(node, nodes.Getattr | nodes.Getitem):
        return None
    if not isinstance(node.node, nodes.Name) or node.node.name != ROW:
        return None
    if isinstance(node, nodes.Getattr):
        return node.attr
    key = node.arg.value if isinstance(node.arg, nodes.Const) else None
    return key if isinstance(key, str) else None


def _check_answers(pipeline: Pipeline, stage: Stage, reader: str) -> None:
    """Refuse a stage whose answers have no largest length, as prompts of `reader` show them."""
    if stage.fields.get("echo"):
        expected = f"false, as {reader} reads the answers"
        raise wrong_key(pipeline.path, stage.name, "echo", expected, True)
    if not stage.max_tokens:
        expected = f"a number from 1, as {reader} reads the answers"
        raise wrong_key(pipeline.path, stage.name, "max_tokens", expected, stage.max_tokens)


def request_line(custom_id: str, url: str, body: dict) -> bytes:
    """An OpenAI Batch line."""
    line = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return dump_line(line) + b"\n"
