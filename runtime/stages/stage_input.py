"""Writes the input of a stage: a request for each row that the earlier stages answered.

The files are written again by each run until the stage has finished, with the same content, as they
depend on the job's input and finished stages alone.
"""

from collections.abc import Callable, Iterator
from itertools import islice

from ..errors import RowError
from ..files.disk import Disk, replace_file
from ..files.strict_json import dump_line
from ..rows.lines import BadRow
from ..rows.results import OutputLines
from .pipeline_file import ROW
from .stage_renderer import StageRenderer
from .stage_rows import FollowedRow, InputRow, StageFiles, error_record

CHUNK_ROWS = 256
"""The number of rows that are rendered at once."""


def write_input(
    files: StageFiles,
    rows: Iterator[FollowedRow],
    renderer: StageRenderer,
    lines: OutputLines,
    disk: Disk,
    on_error: Callable[[BadRow], None],
) -> None:
    """Write the requests of a stage, and the errors of rows that have none.

    Args:
        files: The files of the stage.
        rows: The rows of the job after the earlier stages.
        renderer: Renders the requests.
        lines: Makes the lines of errors.
        disk: Disk operations.
        on_error: Called with each row that ends here.
    """
    errors: list[bytes] = []

    def fail(bad: BadRow) -> None:
        on_error(bad)
        errors.append(error_record(bad.row, dump_line(lines.error(bad, bad.error))))

    replace_file(disk, files.input, _requests(rows, renderer, fail))
    replace_file(disk, files.errors, errors)


def _requests(
    rows: Iterator[FollowedRow], renderer: StageRenderer, fail: Callable[[BadRow], None]
) -> Iterator[bytes]:
    alive = (followed for followed in rows if followed.stage is None)
    while chunk := list(islice(alive, CHUNK_ROWS)):
        contexts = [
            {ROW: followed.row.data, **followed.answers}
            for followed in chunk
            if isinstance(followed.row, InputRow)
        ]
        rendered = iter(renderer.render(contexts))
        for followed in chunk:
            row = followed.row
            if isinstance(row, BadRow):
                fail(row)
                continue
            request = next(rendered)
            if isinstance(request, RowError):
                fail(row.failed(request))
                continue
            yield request_line(row.custom_id, *request)


def request_line(custom_id: str, url: str, body: dict) -> bytes:
    """An OpenAI Batch line."""
    line = {"custom_id": custom_id, "method": "POST", "url": url, "body": body}
    return dump_line(line) + b"\n"
