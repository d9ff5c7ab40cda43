"""The token ids of a batch file's prompts, for commands that read prompts and answer none."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint import ModelFiles
from ..errors import InputError
from .columns import Columns
from .job_text import open_text
from .lines import BadRow, BatchRow
from .row_files import check_input, open_rows, unit_of
from .scan import scan


def read_row_ids(path: Path, files: ModelFiles) -> list[list[int]]:
    """The token ids of the prompts of a batch file, in order.

    Args:
      path: The batch file.
      files: The model whose tokenizer and chat template encode the prompts.

    Raises:
      InputError: The file cannot be read, has no rows, or a row is wrong or has no prompt.
    """
    check_input(path)
    rows: list[list[int]] = []
    vocab_size = files.spec.config.vocab_size

    def refuse(bad: BadRow) -> None:
        raise InputError(f"{path}: {bad}")

    def keep(row: BatchRow, ids: Sequence[int]) -> None:
        if row.pooled is not None:
            raise InputError(
                f"{path}: {row.place}: expected rows with prompts, got embedding rows, as for "
                f"{row.pooled.task}. Give rows with prompt or messages."
            )
        if beyond := [token for token in ids if token >= vocab_size]:
            raise InputError(
                f"{path}: {row.place}: expected ids below {vocab_size}, got {beyond[0]}."
            )
        rows.append(list(ids))

    folder = Path(tempfile.gettempdir())
    opened = open_rows(path, Columns(), folder, note=lambda message: None)
    with opened as source, open_text(files) as text:
        scan(source.file, text.encode, unit=unit_of(path), on_error=refuse, on_encoded=keep)
    if not rows:
        raise InputError(f"{path}: expected at least one row, got none.")
    return rows
