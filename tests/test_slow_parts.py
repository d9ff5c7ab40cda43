"""The parts of the slow tests have each slow test once, and a like share of every file."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from slow_parts import index_and_count, slow_part

HERE = Path(__file__).parent
IDS = [f"test_{file}.py::test[{case}]" for file in range(40) for case in range(2 * file)]
FILE = """\
import pytest


@pytest.mark.parametrize("case", range(7))
@pytest.mark.slow
def test_slow(case):
    pass


@pytest.mark.parametrize("case", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_in_cases(case):
    pass
"""


def test_ten_parts_have_every_test_once():
    parts = [slow_part(IDS, index, 10) for index in range(10)]
    assert Counter(test for part in parts for test in part) == Counter(IDS)
    assert {len(part) for part in parts} == {len(IDS) // 10}


@pytest.mark.parametrize("file", [0, 3, 11, 39])
def test_parts_have_a_like_share_of_every_file(file):
    shares = [
        sum(test.startswith(f"test_{file}.py") for test in slow_part(IDS, index, 10))
        for index in range(10)
    ]
    assert sum(shares) == 2 * file and max(shares) - min(shares) <= 1


def test_a_part_does_not_depend_on_the_order_of_the_tests():
    assert slow_part(IDS[::-1], 3, 10) == slow_part(IDS, 3, 10)


def test_a_run_of_a_part_runs_its_slow_tests_and_no_others(tmp_path):
    (tmp_path / "test_file.py").write_text(FILE)
    (tmp_path / "conftest.py").write_text((HERE / "conftest.py").read_text("utf-8"))
    passed = []
    for index in range(3):
        command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
        options = ["--slow-part", f"{index}/3", str(tmp_path)]
        done = subprocess.run([*command, *options], cwd=HERE, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
        passed += re.findall(r"::(\S+) PASSED", done.stdout)
    slow = [f"test_slow[{case}]" for case in range(7)]
    assert sorted(passed) == ["test_in_cases[1]", *slow]


@pytest.mark.parametrize("text", ["10/10", "3", "-1/10", "a/b"])
def test_a_part_that_cannot_be_is_refused(text):
    with pytest.raises(pytest.UsageError, match="--slow-part: expected i/n with 0 <= i < n, got"):
        index_and_count(text)
