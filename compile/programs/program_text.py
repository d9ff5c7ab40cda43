"""The text of a compiled program, also where XLA can only write it while it compiles.

Programs with asynchronous slices, which XLA makes for some generations of TPU, cannot be written
afterwards. The TPU's compiler writes a program's text into a folder as it compiles, if asked to.

Knows nothing of graphs or of what the text says.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

_WRITTEN = "*.after_codegen.txt"


@contextmanager
def text_folder() -> Iterator[Path]:
    """A folder for the text of one program, which is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="noria-program-") as folder:
        yield Path(folder)


def writing_options(folder: Path) -> dict[str, Any]:
    """Options with which the TPU's compiler writes the text of a program into a folder."""
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}


def program_text(executable: jax.stages.Compiled, folder: Path | None = None) -> str | None:
    """The text that the readers of this room take; None where XLA cannot write it.

    `folder` is where the compiler has written it, if it was asked to.
    """
    if folder is not None:
        # beside the program there may be small ones that the compiler made on the way
        written = sorted(folder.glob(_WRITTEN), key=lambda path: path.stat().st_size)
        if written:
            return written[-1].read_text("utf-8")
    try:
        return executable.as_text() or ""
    except RuntimeError:
        return None
