"""Loads the kernels for the CPU, whose object code is kept beside compiled programs."""

from collections.abc import Callable

from ...compile.target_names import TargetName
from ...modelzoo.kernels.cpu import kept
from ..errors import CacheUnusable
from ..files.folders import default_directory
from .compilation_cache import make_folder

FOLDER = "kernels"
"""The name of the folder, beside those of programs."""


def load_kernels(target: str, on_note: Callable[[str], object]) -> None:
    """Load the kernels for the CPU if a target is one; a line says why, if there are none.

    Args:
      target: The target's name.
      on_note: Called with the line, and with another one before kernels compile.
    """
    if TargetName.parse(target).platform != "cpu":
        return
    try:
        folder = default_directory().with_name(FOLDER)
        make_folder(folder)
    except CacheUnusable:
        folder = None  # the cache of programs has said so
    begun = "compiling kernels for this processor, which takes about 15 s, once"
    if (reason := kept.load(folder, lambda: on_note(begun))) is not None:
        on_note(f"without the kernels for the CPU, attention takes longer: {reason}")
