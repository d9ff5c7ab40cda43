"""The first pass over a batch file, which measures every row without keeping its prompt.

Does not know about the journal, devices or buckets. Guarantees: one `ScannedRow` for each line that
is not blank, in order, with custom_ids unique among the rows that will run; memory per row is small
and does not grow with its prompt.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, BinaryIO, TypeVar

from ..embedding.texts import lengths_of
from ..errors import InputError, RowError
from ..files.strict_json import Line, Unit, read_line_at, read_lines
from .lines import (
    PLAIN,
    BadRow,
    BatchRow,
    PlacedRow,
    RequestRules,
    read_row,
    with_unique_ids,
)
from .prompt_encoder import Encoded

if TYPE_CHECKING:
    from ...compile.grids.prefix_table import PrefixTable

Encode = Callable[[Sequence[BatchRow]], Sequence[Encoded]]
CHUNK_ROWS = 256
CHUNK_BYTES = 2**20
"""Rows are encoded in chunks, which end at `CHUNK_ROWS` rows or at `CHUNK_BYTES` bytes."""
MAX_AHEAD = 3
"""Maximum number of items that `map_ahead` works on ahead of its consumer."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RowRequirements:
    """The facts of a request that decide which buckets and graphs it needs."""

    prompt_length: int
    max_tokens: int | None
    n: int
    prompt_logprobs: int | None
    has_stops: bool = False
    """Whether the text of the request may end it: stop strings, or a rule for its samples."""
    structure: str | None = None
    """The fingerprint of the form that its answers have."""
    text_lengths: tuple[int, ...] = ()
    """The lengths of the texts to embed; empty for other requests."""


@dataclass(frozen=True, slots=True)
class ScannedRow(PlacedRow):
    """The place and the requirements of a row, or its error if the scan found one."""

    requirements: RowRequirements | None
    bad: BadRow | None

    @property
    def key(self) -> tuple[str, str]:
        """The key by which the journal finds the row."""
        return self.custom_id or "", self.request_hash


@dataclass(frozen=True)
class ScanSummary:
    """The scanned rows, the hash and the size of the whole input."""

    rows: Sequence[ScannedRow]
    input_sha256: str
    num_bytes: int
    prefixes: "PrefixTable"
    """The common beginnings of the rows; row numbers are those of `rows`."""

    @property
    def requirements(self) -> list[RowRequirements]:
        """The requirements of every row that can run, in input order."""
        return [row.requirements for row in self.rows if row.requirements is not None]


def scan(
    file: BinaryIO,
    encode: Encode,
    rules: RequestRules = PLAIN,
    *,
    unit: Unit = "line",
    on_error: Callable[[BadRow], None] = lambda bad: None,
    on_encoded: Callable[[BatchRow, Sequence[int]], None] = lambda row, ids: None,
    on_progress: Callable[[int, int], None] = lambda num_rows, num_bytes: None,
) -> ScanSummary:
    """Read, tokenize and measure every row; rows are read while earlier rows are tokenized.

    Args:
        file: The input, open at its beginning.
        encode: Returns token ids or an error for each of several rows; called in another thread.
        rules: The rules by which requests are read.
        unit: The unit in which errors count places.
        on_error: Called with each row in error, in order, as soon as it is known.
        on_encoded: Called with each other row and its token ids, in order.
        on_progress: Called with the numbers of rows and bytes so far, after every chunk.
    """
    from .prefix_index import PrefixIndex  # only a job that scans waits for numpy

    digest = hashlib.sha256()
    rows: list[ScannedRow] = []
    distinct: dict[RowRequirements, RowRequirements] = {}
    prefixes = PrefixIndex()
    num_bytes = 0

    def observe(piece: bytes) -> None:
        nonlocal num_bytes
        num_bytes += len(piece)
        digest.update(piece)

    lines = enumerate(read_lines(file, observe=observe, unit=unit))
    read = with_unique_ids(read_row(line, index, rules) for index, line in lines)
    for encoded in map_ahead(partial(_encode_chunk, encode), _chunks(read)):
        for outcome in encoded:
            if isinstance(outcome, BadRow):
                on_error(outcome)
                rows.append(_scanned_row(outcome))
                continue
            row, ids = outcome
            on_encoded(row, ids)
            requirements = _requirements_of(row, ids)
            # texts that are embedded share no prefixes
            shared = ids if row.pooled is None else ()
            prefixes.add(row.row, shared, row.params.prompt_logprobs, row.adapter)
            # rows with equal requirements share one object
            rows.append(_scanned_row(row, distinct.setdefault(requirements, requirements)))
        on_progress(len(rows), num_bytes)
    return ScanSummary(rows, digest.hexdigest(), num_bytes, prefixes.table())


def map_ahead(work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
    """Yield the results of `work` for all items in order; another thread works a few items ahead.

    `items` is read in the consumer's thread. An error of the work is raised in place of its result;
    a consumer that stops does not wait for unfinished work.
    """
    worker = ThreadPoolExecutor(1)
    waiting: deque[Future[Result]] = deque()
    try:
        for item in items:
            waiting.append(worker.submit(work, item))
            if len(waiting) > MAX_AHEAD:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        worker.shutdown(wait=False, cancel_futures=True)


def _chunks(rows: Iterable[BatchRow | BadRow]) -> Iterator[list[BatchRow | BadRow]]:
    chunk: list[BatchRow | BadRow] = []
    for row in rows:
        num_bytes = row.offset - chunk[0].offset if chunk else 0
        if len(chunk) == CHUNK_ROWS or num_bytes >= CHUNK_BYTES:
            yield chunk
            chunk = []
        chunk.append(row)
    if chunk:
        yield chunk


def _encode_chunk(
    encode: Encode, chunk: Sequence[BatchRow | BadRow]
) -> list[BadRow | tuple[BatchRow, Sequence[int]]]:
    """Each row of a chunk with its token ids, or the error row that it becomes."""
    encoded = iter(encode([row for row in chunk if isinstance(row, BatchRow)]))
    outcomes = []
    for row in chunk:
        ids = row if isinstance(row, BadRow) else next(encoded)
        if isinstance(row, BatchRow) and isinstance(ids, RowError):
            ids = row.failed(ids)
        outcomes.append(ids if isinstance(ids, BadRow) else (row, ids))
    return outcomes


def read_again(file: BinaryIO, scanned: ScannedRow, rules: RequestRules) -> BatchRow:
    """Read a row that the scan accepted again, to run it.

    Raises:
        InputError: The line has changed since the scan.
    """
    content = read_line_at(file, scanned.offset)
    line = Line(scanned.line_number, scanned.offset, content, scanned.unit)
    row = read_row(line, scanned.row, rules)
    if isinstance(row, BadRow) or (row.custom_id, row.request_hash) != scanned.key:
        raise InputError(
            f"{scanned.place} of the input changed while the job ran. Finished rows are "
            "kept; run the same command again to continue with the changed file."
        )
    return row


def _requirements_of(row: BatchRow, ids: Sequence[int]) -> RowRequirements:
    params = row.params
    return RowRequirements(
        prompt_length=len(ids),
        max_tokens=params.max_tokens,
        n=params.n,
        prompt_logprobs=params.prompt_logprobs,
        has_stops=bool(params.stop) or params.stopping is not None,
        structure=params.form and params.form.fingerprint,
        text_lengths=() if row.pooled is None else lengths_of(ids),
    )


def _scanned_row(row: BatchRow | BadRow, requirements: RowRequirements | None = None) -> ScannedRow:
    bad = row if isinstance(row, BadRow) else None
    return ScannedRow(
        row.row, row.line_number, row.offset, row.custom_id, row.request_hash, requirements, bad,
        unit=row.unit,
    )  # fmt: skip
