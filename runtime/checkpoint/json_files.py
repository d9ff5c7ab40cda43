"""Small JSON files of a model directory, read strictly, and names that stay inside it.

Knows nothing of what the files mean. A model directory is data from a stranger: what the strict
parser of the batch lines refuses (duplicate keys, NaN, nesting without end) is refused here too,
and so are files too large to be what they say and names that lead elsewhere.
"""

from pathlib import Path
from typing import Any

from ..request import RowError
from ..strict_json import parse_object
from .errors import CheckpointError, InvalidConfig

MAX_JSON_BYTES = 32 * 2**20


def read_json_object(path: Path, error: type[CheckpointError] = InvalidConfig) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise error(f"{path}: expected at most {MAX_JSON_BYTES} bytes, got {size}.")
    return parse_json_object(path.read_bytes(), str(path), error)


def parse_json_object(
    data: bytes, where: str, error: type[CheckpointError] = InvalidConfig
) -> dict[str, Any]:
    """Parse one JSON object; `where` opens the message of the error."""
    try:
        return parse_object(data)
    except RowError as problem:
        raise error(f"{where}: {problem.message}") from None


def file_inside(directory: Path, name: object, suffix: str, where: str) -> Path:
    """Return `directory/name` for a bare file name that does not lead out of the directory.

    A link out is refused, with one exception: the snapshots of the Hugging Face cache are
    directories of links into `blobs`, two levels up, and a link to there is followed.
    """
    if not isinstance(name, str) or not name.endswith(suffix) or name.startswith("."):
        raise CheckpointError(f"{where}: expected a file name ending in {suffix!r}, got {name!r}.")
    if any(character in name for character in "/\\:\0"):
        raise CheckpointError(f"{where}: expected a bare file name, got {name!r}.")
    path = directory / name
    if not path.is_file():
        raise CheckpointError(f"{where}: expected the file {name!r} in {directory}, got none.")
    homes = [directory.resolve()]
    if directory.resolve().parent.name == "snapshots":
        homes.append(directory.resolve().parent.parent / "blobs")
    if path.resolve().parent not in homes:
        raise CheckpointError(
            f"{where}: expected {name!r} to lie in {directory}, got a link to {path.resolve()}. "
            f"Copy the file in if you trust it."
        )
    return path
