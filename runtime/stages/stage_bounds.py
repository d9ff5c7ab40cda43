"""Measures the rows of all stages before any of them runs, so that one plan covers them all.

The prompts of later stages are not known yet. Each of them is rendered with a placeholder for each
answer. Its length is the number of tokens of this text, placeholders included, plus the
`max_tokens` of each answer that it shows. The tokens of a placeholder are a reserve, as an answer
that is encoded again may have more tokens. A template may show more in a branch that placeholders
do not take. If a prompt then fits no bucket, it is refused by name; `max_prompt_tokens` makes the
plan large enough.

Later stages share beginnings up to their first answer, less a few tokens, because an answer may
change how the text directly before it is cut into tokens.

Does not know about devices. Guarantees: the bounds depend on the whole input, the pipeline and the
tokenizer alone, so all parts of a job have the same.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from datetime import datetime
from functools import cache
from itertools import islice

from ..batch.job import JobModel, JobSettings
from ..errors import RowError
from ..files.disk import open_nameless
from ..rows.job_text import JobText
from ..rows.lines import BadRow, BatchRow
from ..rows.prompt_encoder import Encoded
from ..rows.scan import ScanSummary, scan
from ..text.chat_messages import iterate_strings
from .pipeline_file import ROW, Stage
from .stage_renderer import CHUNK_ROWS, Context, StageRenderer, answers_table, request_line
from .stage_rows import InputRow

_FIRST_MARK = 0x10FF00
"""The placeholder of the first stage; the others follow. All are private, so no text has them."""
_LEAD_BYTE = 0xF4
"""The first byte of a placeholder in UTF-8, which only the plane of private characters has."""
_MARGIN = 8
"""Tokens before the first answer that do not count as shared."""
_OWN_ID = 2**31
"""Above all token ids: stands for tokens that no other row has."""


def measure_stages(
    settings: JobSettings,
    model: JobModel,
    renderers: Sequence[StageRenderer],
    rows: Iterator[InputRow | BadRow],
    max_position: int,
    on_progress: Callable[[int, int, int], None],
) -> ScanSummary:
    """Measure the rows of all stages, as if they were rows of one job.

    Args:
        settings: The job.
        model: Its model.
        renderers: The renderers of all stages.
        rows: All rows of the input.
        max_position: The number of positions of the model; no bound is longer.
        on_progress: Called with the numbers of measured rows and bytes, and of all bytes, now and
            then.
    """
    stages = [renderer.stage for renderer in renderers]
    line_numbers: list[int] = []
    with (
        closing(open_nameless(settings.files.output.parent)) as requests,
        model.open_text(settings.identity.now or datetime.now()) as text,
    ):
        for content, number in _requests(rows, renderers):
            requests.write(content)
            line_numbers += number
        total_bytes = requests.tell()
        requests.seek(0)
        encoder = _BoundingEncoder(text, stages, max_position)
        summary = scan(
            requests,
            encoder.encode,
            settings.rules,
            on_progress=lambda rows, num_bytes: on_progress(rows, num_bytes, total_bytes),
        )
    scanned = [
        replace(row, line_number=number)
        for row, number in zip(summary.rows, line_numbers, strict=True)
    ]
    return replace(summary, rows=scanned)


def _requests(
    rows: Iterator[InputRow | BadRow], renderers: Sequence[StageRenderer]
) -> Iterator[tuple[bytes, list[int]]]:
    """The request lines of some rows for each stage, and their line numbers in the input."""
    readable = (row for row in rows if isinstance(row, InputRow))
    while chunk := list(islice(readable, CHUNK_ROWS)):
        contexts = [_placeholders(row, renderers) for row in chunk]
        lines, numbers = [], []
        for renderer in renderers:
            for row, request in zip(
                chunk, renderer.render(contexts, is_measured=True), strict=True
            ):
                if not isinstance(request, RowError):
                    name = f"{row.custom_id} in stage {renderer.stage.name}"
                    lines.append(request_line(name, *request))
                    numbers.append(row.line_number)
        yield b"".join(lines), numbers


def _placeholders(row: InputRow, renderers: Sequence[StageRenderer]) -> Context:
    """The variables of templates for a row, with a placeholder for each answer."""
    answers = {
        renderer.stage.name: answers_table(renderer.placeholders(row.data, _mark(index)))
        for index, renderer in enumerate(renderers)
    }
    return {**answers, ROW: row.data}


def _mark(stage: int) -> str:
    return chr(_FIRST_MARK + stage)


class _BoundingEncoder:
    """Encodes a prompt with placeholders into as many ids as the real prompt may have."""

    def __init__(self, text: JobText, stages: Sequence[Stage], max_position: int):
        self._text = text
        self._limits = {_mark(i): stage.max_tokens or 0 for i, stage in enumerate(stages)}
        self._longest = {
            f" in stage {stage.name}": stage.max_prompt_tokens
            for stage in stages
            if stage.max_prompt_tokens is not None
        }
        self._max_position = max_position
        tokens = text.tokens
        self._begins_mark = cache(
            lambda token: tokens is not None and _LEAD_BYTE in tokens.token_bytes(token)
        )

    def encode(self, rows: Sequence[BatchRow]) -> list[Encoded]:
        encoded = self._text.encode(rows)
        return [
            ids if isinstance(ids, RowError) else self._bounded(row, ids)
            for row, ids in zip(rows, encoded, strict=True)
        ]

    def _bounded(self, row: BatchRow, ids: Sequence[int]) -> Sequence[int]:
        content = "".join(iterate_strings([row.messages or [], row.prompt or ""]))
        more = sum(content.count(mark) * limit for mark, limit in self._limits.items())
        given = next((n for name, n in self._longest.items() if row.custom_id.endswith(name)), None)
        if not more and given is None:
            return ids
        room = self._max_position - (row.params.max_tokens or 1)
        length = max(1, min(len(ids) + more if given is None else given, room))
        first = next((i for i, token in enumerate(ids) if self._begins_mark(token)), 0)
        shared = min(max(0, first - _MARGIN), length)
        return [*ids[:shared], *[_OWN_ID + row.row] * (length - shared)]
