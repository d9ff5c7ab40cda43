"""The table of bytes with codes: its models are here, and its rows have the ratios."""

from pathlib import Path

from numerics_helpers import script

script("scripts/read_graphs.py")  # which the table imports
TABLE = script("scripts/compiled_numbers.py")
FOUND = {
    "layout": "weight-stationary-1d@tensor=8",
    "needed": 200e6,
    "moved": 210e6,
    "converted": 0,
}


def test_every_case_is_of_a_model_that_is_here_and_named_once():
    assert len({case.name for case in TABLE.CASES}) == len(TABLE.CASES)
    for case in TABLE.CASES:
        assert (Path(TABLE.MODELS) / case.model / "config.json").is_file()


def test_rows_have_the_ratio_of_moved_and_needed_bytes():
    wanted = f"| 8B | {FOUND['layout']} | 200 | 210 | 1.05 | 0 |"
    assert TABLE.row("8B", FOUND) == wanted
    assert TABLE.row("8B", {"refused": "too large"}) == "| 8B | too large | | | | |"
