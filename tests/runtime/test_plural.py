"""Numbers with their nouns, and the most frequent lines of output."""

from pathlib import Path

import pytest

from noria.runtime.batch.output import summarise
from noria.runtime.console import plural


@pytest.mark.parametrize(
    ("number", "expected"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (11, "11 rows")]
)
def test_one_is_singular_and_all_others_are_not(number, expected):
    assert plural(number, "row") == expected


def test_a_job_of_one_row_is_summarised_in_the_singular():
    rows = {
        "total": 1,
        "errors": 1,
        "ok_with_dropped_choices": 0,
        "ok_at_max_length": 0,
        "ok_with_stopped_samples": 0,
    }
    seconds = {f"{phase}_seconds": 1.0 for phase in ("scan", "load", "build", "run")}
    manifest = {"rows": rows, "output_tokens_per_second": None, **seconds}
    assert summarise(Path("out.jsonl"), manifest).startswith("out.jsonl: 1 row, 1 error ")


def test_prefixes_end_with_es():
    assert plural(2, "prefix") == "2 prefixes"
