"""Read tables of lengths: CSV files with the token counts of one request in each line.

The columns are `prompt_tokens`, `output_tokens` and optionally `max_tokens`, for rows that may emit
more tokens than expected, and `rows`, the number of rows that a line stands for. Values of the last
two may be empty. The files of spreadsheets are read
as they are: with a byte order mark, either kind of line end, and spaces around values. Any other
deviation is refused with its line number. Does not know about models.
"""

import csv
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path

from ...compile.grids.row_shape import RowShape
from ...compile.planning.run_bounds import ExpectedRow
from ..errors import ConfigError

COLUMNS = ("prompt_tokens", "output_tokens", "max_tokens", "rows")
MAX_ROWS_OF_LINE = 10_000_000
_MAX_SHOWN = 40
"""The number of characters of a wrong value that an error shows."""


def read_table(path: Path) -> Iterator[ExpectedRow]:
    """Read the rows of a table; raises ConfigError with the number of a wrong line."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        lines = csv.reader(file)
        try:
            columns = [name.strip() for name in next(lines, [])]
            _check_columns(path, columns)
            for cells in filter(None, lines):
                yield from _rows(f"{path} line {lines.line_num}", columns, cells)
        except csv.Error as error:
            raise ConfigError(
                f"{path} line {lines.line_num}: expected values separated by commas, got: {error}."
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{path}: expected CSV in UTF-8, got: {error}. Save the file as UTF-8."
            ) from None


def _check_columns(path: Path, columns: Sequence[str]) -> None:
    is_distinct = len(set(columns)) == len(columns)
    if not (is_distinct and set(COLUMNS[:2]) <= set(columns) <= set(COLUMNS)):
        raise ConfigError(
            f"{path} line 1: expected the columns {', '.join(COLUMNS)} (the last two optional), "
            f"separated by commas, got {_shown(', '.join(columns) or 'none')}. A table of prompts "
            f"cannot be planned: give the prompts as JSON Lines."
        )


def _rows(where: str, columns: Sequence[str], cells: Sequence[str]) -> Iterator[ExpectedRow]:
    if len(cells) != len(columns):
        raise ConfigError(
            f"{where}: expected {len(columns)} values ({', '.join(columns)}), got {len(cells)}."
        )
    values = dict(zip(columns, map(str.strip, cells), strict=True))
    prompt, output = (_count(where, name, values) for name in COLUMNS[:2])
    limit = _count(where, "max_tokens", values) if values.get("max_tokens") else output
    if prompt < 1 or output > limit:
        raise ConfigError(
            f"{where}: expected at least one prompt token, and outputs from 0 to max_tokens, got "
            f"{prompt}, {output} and {limit}."
        )
    num_rows = _count(where, "rows", values) if values.get("rows") else 1
    if not 1 <= num_rows <= MAX_ROWS_OF_LINE:
        raise ConfigError(
            f"{where}: expected 1 to {MAX_ROWS_OF_LINE} for rows, got {num_rows}. Use several "
            f"lines, or leave the line out."
        )
    return repeat(ExpectedRow(RowShape(prompt, limit), output), num_rows)


def _count(where: str, name: str, values: Mapping[str, str]) -> int:
    """The number in a cell; `int` alone would accept `1_000`."""
    value = values[name]
    if not (value.isascii() and value.isdigit() and len(value) < _MAX_SHOWN):
        raise ConfigError(
            f"{where}: expected a whole number from 0 up for {name}, got {_shown(repr(value))}."
        )
    return int(value)


def _shown(text: str) -> str:
    return text if len(text) <= 3 * _MAX_SHOWN else f"{text[: 3 * _MAX_SHOWN]} ..."
