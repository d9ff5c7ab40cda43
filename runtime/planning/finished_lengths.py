"""Read the lengths of answers from the output of a finished job, and learn from them.

For the rows of the same job, the lengths are known. For other rows they are learned: answered rows
are sorted into bins by endpoint and prompt length, and a row is expected to emit as many tokens as
an answered row of its bin. The rows of a bin take these in turn, from all parts of its
distribution, so that the sum, the spread and the longest answers are those of the finished job.

Does not know about workloads or grids. Guarantees: the same output and rows give the same lengths.
"""

import json
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..console import plural
from ..errors import JobError
from ..files.disk import digest_file
from ..files.manifest import read_manifest
from ..rows.part import WHOLE
from ..rows.row_files import output_lines

OK = 200
MAX_BINS = 16
"""The largest number of bins of an endpoint."""
MIN_ROWS = 24
"""The smallest number of answered rows in a bin, if an endpoint has as many."""
_GOLDEN = (math.sqrt(5) - 1) / 2
"""Multiples of it, without their whole parts, are spread evenly over 0 to 1, however many."""


@dataclass(frozen=True)
class AnsweredRow:
    """The lengths of a row that a finished job answered."""

    is_chat: bool
    prompt_length: int
    output: int
    """The mean number of tokens of its answers, rounded down, as a line has only their sum."""
    stopped: bool
    """Whether a stop ended one of its answers."""


@dataclass(frozen=True)
class FinishedJob:
    """The output of a finished job, or of a part of one."""

    path: Path
    manifest: Mapping[str, Any]
    rows: Mapping[str, AnsweredRow]
    """The answered rows by id."""

    def answered(self, input_sha256: str) -> bool:
        """Whether the job has answered all rows of an input, but for rows that ended as errors."""
        configuration = self.manifest["configuration"]
        # the input of a stage has only the rows of the part
        is_whole = "stage" in configuration or configuration["rows"] == str(WHOLE)
        return is_whole and self.manifest["input"]["sha256"] == input_sha256


def read_finished_job(output: Path) -> FinishedJob:
    """Read the output of a finished job; merged outputs and parts are possible too.

    Raises:
      JobError: The output is not finished, has changed, has no answers, or is that of stages.
    """
    manifest = read_manifest(output)
    if manifest is None:
        raise JobError(
            f"{output}: expected the output of a finished job with its manifest beside it, got no "
            f"manifest. Finish the job first.",
        )
    if "pipeline" in manifest["configuration"] and "stages" in manifest:
        raise JobError(
            f"{output}: expected the output of a job without stages, got one that has stages. Keep "
            f"their files with --keep-stages, and give the input and the output of one stage.",
        )
    recorded = manifest["outputs"].get(output.name, {}).get("sha256")
    if recorded != digest_file(output).sha256:
        raise JobError(
            f"{output}: expected the content that its manifest records, got another content. Run "
            f"the job again.",
        )
    rows = _answered_rows(output)
    if not rows or not manifest["plan"]:
        raise JobError(
            f"{output}: expected the output of a job with at least one row of answered tokens, got "
            f"none. Give that of another job.",
        )
    return FinishedJob(output, manifest, rows)


def _answered_rows(output: Path) -> dict[str, AnsweredRow]:
    rows = {}
    with output.open("rb") as file:
        for line in output_lines(output, file):
            record = json.loads(line)
            if record["response"] is None or record["response"]["status_code"] != OK:
                continue
            if "choices" in (body := record["response"]["body"]):  # vectors and scores have none
                rows[record["custom_id"]] = _answered_row(body)
    return rows


def _answered_row(body: Mapping[str, Any]) -> AnsweredRow:
    choices, usage = body["choices"], body["usage"]
    # a rule may have kept only some of the samples, and the usage counts all of them
    num_answers = choices[0].get("noria", {}).get("samples", len(choices))
    return AnsweredRow(
        "message" in choices[0],
        usage["prompt_tokens"],
        usage["completion_tokens"] // num_answers,
        any(choice["finish_reason"] == "stop" for choice in choices),
    )


@dataclass
class LengthForecast:
    """Expected lengths of answers by endpoint and prompt length."""

    bins: Mapping[bool, Sequence["_Bin"]]
    """The bins of chat rows (True) and of completions, by prompt length."""
    _num_taken: Counter[tuple[bool, int]] = field(default_factory=Counter)

    @classmethod
    def learn(cls, rows: Sequence[AnsweredRow]) -> "LengthForecast":
        """Learn from answered rows; rows without output, which were scored, do not count."""
        generated = [row for row in rows if row.output]
        kinds = (True, False)
        return cls({kind: _bins([r for r in generated if r.is_chat == kind]) for kind in kinds})

    def next_row(self, *, is_chat: bool, prompt_length: int) -> AnsweredRow | None:
        """The answered row that the next row with such a prompt resembles; None if there is none.

        Without answered rows of its endpoint, those of the other endpoint count.
        """
        kind = is_chat if self.bins[is_chat] else not is_chat
        if not (bins := self.bins[kind]):
            return None
        index = max(0, bisect_right(bins, prompt_length, key=lambda b: b.first_length) - 1)
        number = self._num_taken[kind, index]
        self._num_taken[kind, index] += 1
        rows = bins[index].rows
        return rows[int((0.5 + number * _GOLDEN) % 1 * len(rows))]

    def __str__(self) -> str:
        every = [b for bins in self.bins.values() for b in bins]
        rows = sum(len(b.rows) for b in every)
        return f"{plural(rows, 'answered row')} in {plural(len(every), 'bin')}"


@dataclass(frozen=True)
class _Bin:
    """Answered rows with prompts of similar length."""

    first_length: int
    rows: Sequence[AnsweredRow]
    """Sorted by the length of their answers."""


def _bins(rows: Sequence[AnsweredRow]) -> list[_Bin]:
    """Bins with equal numbers of rows; prompts of equal length are in one bin."""
    if not rows:
        return []
    lengths = sorted(row.prompt_length for row in rows)
    count = max(1, min(MAX_BINS, len(rows) // MIN_ROWS))
    starts = sorted({lengths[len(rows) * i // count] for i in range(count)})
    bins = []
    for first, end in zip(starts, [*starts[1:], math.inf], strict=True):
        members = [row for row in rows if first <= row.prompt_length < end]
        bins.append(_Bin(first, sorted(members, key=lambda row: row.output)))
    return bins
