"""The parts of split GGUF files, named `model-00001-of-00003.gguf` as llama.cpp writes them.

Each part has the tensors of its own, and the keys `split.no`, `split.count` and
`split.tensors.count`; the first part has all other keys. Reads no tensors. Guarantees: every part
of a model that is opened is there once, and in its place.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from .gguf_header import GGUFHeader

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def whole_name(path: Path) -> str:
    """The name of the model in a file, without the number of a part."""
    part = _PART.fullmatch(path.name)
    return part[1] if part else path.stem


def parts_of(path: Path) -> list[Path]:
    """All parts of the model of which a file is a part, in order; the file alone if it is whole.

    Raises:
      CheckpointError: A part is missing; the message names it.
    """
    part = _PART.fullmatch(path.name)
    if part is None or not 1 <= int(part[2]) <= int(part[3]):
        return [path]
    name, count = part[1], int(part[3])
    files = [path.with_name(f"{name}-{i:05}-of-{count:05}.gguf") for i in range(1, count + 1)]
    if missing := [file.name for file in files if not file.is_file()]:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{path}: expected all {count} parts of the model in its folder, got none of the name "
            f"{', '.join(missing[:3])}{more}. Fetch the missing parts, too."
        )
    return files


def check_part(
    path: Path, header: GGUFHeader, number: int, count: int, earlier: Collection[str]
) -> None:
    """Check that a file is the part that its name says, with other tensors than earlier parts.

    Raises:
      CheckpointError: It is not.
    """
    got = header.metadata.get("split.no"), header.metadata.get("split.count")
    if got != (number, count):
        raise CheckpointError(
            f"{path}: expected split.no {number} and split.count {count}, as its name says, got "
            f"{got[0]} and {got[1]}. Give each part the name that it was published with."
        )
    if twice := sorted(header.tensors.keys() & set(earlier)):
        raise CheckpointError(
            f"{path}: expected other tensors than in the parts before it, got {twice[0]} again. "
            f"Give each part the name that it was published with."
        )


def check_whole(path: Path, metadata: Mapping[str, Any], num_files: int, num_tensors: int) -> None:
    """Check that the opened files are a whole model.

    Raises:
      CheckpointError: They are not.
    """
    if (count := metadata.get("split.count") or 1) != num_files:
        raise CheckpointError(
            f"{path}: expected a whole GGUF file, or a name such as MODEL-00001-of-00003.gguf, got "
            f"one of {count} parts with another name. Give each part the name that it was "
            f"published with, or merge them: llama-gguf-split --merge FIRST-PART WHOLE.gguf"
        )
    expected = metadata.get("split.tensors.count", num_tensors)
    if num_tensors != expected:
        raise CheckpointError(
            f"{path}: expected {expected} tensors in all parts, got {num_tensors}. Fetch the parts "
            f"of one model."
        )
