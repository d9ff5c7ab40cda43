"""JSON files of a model directory, read strictly.

Knows nothing of what the files mean. A model directory is data from a stranger: what the strict
parser of the batch lines refuses (duplicate keys, NaN, nesting without end) is refused here too.
"""

from pathlib import Path
from typing import Any

from ..request import RowError
from ..strict_json import parse_object
from .errors import CheckpointError, InvalidConfig
from .small_files import read_small


def read_json_object(path: Path, error: type[CheckpointError] = InvalidConfig) -> dict[str, Any]:
    """Read a file of a model directory that holds one JSON object; see `read_small`."""
    return parse_json_object(read_small(path, error), str(path), error)


def parse_json_object(
    data: bytes, where: str, error: type[CheckpointError] = InvalidConfig
) -> dict[str, Any]:
    """Parse one JSON object; `where` opens the message of the error."""
    try:
        return parse_object(data)
    except RowError as problem:
        raise error(f"{where}: {problem.message}") from None
