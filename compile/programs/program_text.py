"""The text of a compiled program, also where XLA can write it only during the compile.

XLA makes programs with asynchronous slices for some generations of TPU, and cannot write them
afterwards. But the TPU's compiler can write the text into a folder while it compiles.

Knows nothing of graphs or of the meaning of the text.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax

_WRITTEN = "*.after_codegen.txt"


@contextmanager
def text_folder() -> Iterator[Path]:
    """A temporary folder for the text of one program."""
    with tempfile.TemporaryDirectory(prefix="noria-program-") as folder:
        yield Path(folder)


def program_text(executable: jax.stages.Compiled, folder: Path | None = None) -> str | None:
    """The text for the readers in this folder; None if XLA cannot write it.

    `folder` is the folder into which the compiler wrote the text, if it was asked to.
    """
    if folder is not None:
        # the compiler may have written small helper programs beside the program
        written = sorted(folder.glob(_WRITTEN), key=lambda path: path.stat().st_size)
        if written:
            return written[-1].read_text("utf-8")
    try:
        return executable.as_text() or ""
    except RuntimeError:
        return None
