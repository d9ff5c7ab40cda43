"""The source lines of instructions, from the tables at the head of a program's text.

An instruction names a stack frame, and a table of frames names places in files. The reported frame
is the innermost one below the folder of this package, as `modelzoo/cache/kv_cache.py:245`. If there
is none, it is the innermost frame, with the file's bare name.

Knows nothing of instructions.
"""

import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_SECTIONS = ("FileNames", "FunctionNames", "FileLocations", "StackFrames")
_ENTRY = re.compile(r"^(\d+) (.*)$")


def read_source_lines(hlo_text: str) -> dict[int, str]:
    """The source line of each frame, by the frame's number; empty if the text has no tables."""
    tables = _tables(hlo_text)
    files = {number: text.strip('"') for number, text in tables["FileNames"].items()}
    places = {
        number: (files[_number(text, "file_name_id")], _number(text, "line"))
        for number, text in tables["FileLocations"].items()
    }
    frames = {
        # parents are counted from one, because 0 means that there is no parent
        number: (places[_number(text, "file_location_id")], _number(text, "parent_frame_id") - 1)
        for number, text in tables["StackFrames"].items()
    }
    return {number: _line(frames, number) for number in frames}


def _line(frames: dict[int, tuple[tuple[str, int], int]], number: int) -> str:
    """The innermost of a frame and its parents that is in this package, else the frame itself."""
    (name, line), parent = frames[number]
    fallback = f"{Path(name).name}:{line}"
    while not Path(name).is_relative_to(_ROOT):
        if parent not in frames:
            return fallback
        (name, line), parent = frames[parent]
    return f"{Path(name).relative_to(_ROOT).as_posix()}:{line}"


def _tables(hlo_text: str) -> dict[str, dict[int, str]]:
    """Entries of each section at the head of the text, by their numbers."""
    tables: dict[str, dict[int, str]] = {name: {} for name in _SECTIONS}
    current = None
    for line in hlo_text.splitlines()[1:]:
        if line.startswith(("%", "ENTRY")):
            break
        if line in tables:
            current = line
        elif current and (entry := _ENTRY.match(line)):
            tables[current][int(entry[1])] = entry[2]
    return tables


def _number(text: str, name: str) -> int:
    match = re.search(rf"\b{name}=(\d+)", text)
    return int(match[1]) if match else 0
