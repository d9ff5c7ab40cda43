"""Counts of the calls that remain if text without a choice is prefilled."""

import pytest
from numerics_helpers import script

count_calls = script("scripts/forced_text.py").count_calls
ANSWER = [bool(int(digit)) for digit in "1110000001111100"]


@pytest.mark.parametrize(
    ("shortest", "expected"), [(17, (4, 0)), (6, (4, 0)), (4, (4, 0)), (3, (3, 2)), (1, (3, 2))]
)
def test_runs_are_prefilled_where_a_decode_call_would_begin(shortest, expected):
    """A call of four steps begins inside the second run, of which three tokens are left."""
    assert count_calls(ANSWER, 4, shortest) == expected
