"""Opens the tokenizer side of a model: what turns rows of jobs and files into token ids.

Does not know about weights or devices.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..checkpoint import ModelFiles
from ..errors import EXIT_MODEL, InputError, InvalidTokenizer, JobError
from ..structured.structures import Structures
from ..text.chat_template import ChatRenderer
from ..text.load_tokenizer import load_tokenizer
from ..text.tokenizer import Tokenizer
from .columns import Columns
from .lines import BadRow, BatchRow
from .pooled_encoder import PooledEncoder
from .prompt_encoder import PromptEncoder
from .row_files import check_input, open_rows, unit_of
from .row_kinds import refusal
from .scan import Encode, RowRequirements, scan

if TYPE_CHECKING:
    from ...compile.grids.row_shape import RowShape


@dataclass(frozen=True)
class JobText:
    """The tokenizer side of a model."""

    encode: Encode
    """Turns rows into token ids."""
    tokens: Tokenizer | None
    """Names the token ids in output lines; None without a tokenizer."""
    reads_clock: Callable[[], bool] = lambda: False
    """Whether an encoded prompt shows the time."""
    gave_up: Callable[[], str | None] = lambda: None
    """The chat template's file and the reason, if the template is no longer used; else None."""


@contextmanager
def open_text(
    files: ModelFiles,
    now: datetime | None = None,
    structures: Structures | None = None,
    adapters: Sequence[str] = (),
    *,
    is_strict: bool = False,
) -> Iterator[JobText]:
    """Open the tokenizer of a model, and the process that renders its chat template.

    Args:
        files: The model; without a tokenizer, rows must have token ids.
        now: The time that templates see; by default the time of this call.
        structures: Compiles the forms of answers that rows ask for.
        adapters: The names of the adapters that rows may use.
        is_strict: Whether texts to embed that are too long are refused instead of cut.

    Raises:
        JobError: The tokenizer's files are invalid, also if this is found in the `with` block.
    """
    structures = structures or Structures()
    try:
        tokenizer = load_tokenizer(files.tokenizer_files, files.path)
        structures.compile_allowed = lambda allowed: _session().allowed_tokens(
            files, tokenizer, allowed
        )
        options: dict[str, Any] = {
            "structures": structures,
            "encode_pooled": PooledEncoder(
                tokenizer, lambda: files.spec.config, is_strict=is_strict
            ),
            "refuse": lambda row: refusal(row, files.spec.config, adapters),
            "max_length": lambda: files.spec.config.max_position,
        }
        if tokenizer is None:
            yield JobText(PromptEncoder(None, **options), None)
            return
        structures.make_trie = lambda: _session().vocabulary_trie(files, tokenizer)
        with closing(ChatRenderer(tokenizer, now=now)) as chat:
            yield JobText(
                PromptEncoder(tokenizer, chat.encode_all, **options),
                tokenizer,
                reads_clock=lambda: chat.reads_clock,
                gave_up=lambda: chat.gave_up,
            )
    except InvalidTokenizer as error:
        raise JobError(str(error), EXIT_MODEL) from error


def _session() -> Any:
    """The module `session`, which imports jax; only rows with forms wait for it."""
    from .. import session

    return session


def row_shape(row: RowRequirements, structures: Structures) -> "RowShape":
    """The requirements of a scanned row as the grid derivation takes them.

    Args:
      row: The requirements.
      structures: The forms of answers, which the scan compiled.
    """
    from ...compile.grids.row_shape import RowShape

    is_scored = row.prompt_logprobs is not None
    shortest = structures.shortest(row.structure)
    return RowShape(row.prompt_length, row.max_tokens, row.n, is_scored, shortest)


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
