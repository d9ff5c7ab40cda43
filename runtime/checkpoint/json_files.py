"""Small JSON files of a model directory, read strictly, and names that stay inside it.

Knows nothing of what the files mean. Refuses what Python's json lets pass: duplicate keys, NaN and
Infinity, anything but an object at the top, nesting without end, files too large to be what they
say. A model directory is data from a stranger.
"""

import json
from pathlib import Path
from typing import Any

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

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            seen = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))
            raise error(f"{where}: expected each key once, got {twice!r} twice.")
        return result

    def no_constant(text: str):
        raise error(f"{where}: expected finite numbers, got {text}.")

    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=unique, parse_constant=no_constant
        )
    except CheckpointError:
        raise
    except (ValueError, RecursionError) as problem:
        raise error(f"{where}: expected a JSON object, got {problem}.") from problem
    if not isinstance(value, dict):
        raise error(f"{where}: expected a JSON object, got {type(value).__name__}.")
    return value


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
