"""The tables of `docs/faults.md`: 80 faults, each with a sentence and a test in every run."""

import ast
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "faults.md"
NOT_IN_EVERY_RUN = "slow or third_party or gpu_compile or tpu_compile or skip or skipif"
"""Markers of tests that need an option, or something that not every machine has."""
ROW = re.compile(r"\| (\d+) \| ([^|]+\.) \| ([^|]+) \|")


def _rows(text: str) -> list[tuple[int, list[str]]]:
    """Return the number and tests of each fault; raise ValueError for a malformed table line."""
    lines = [line for line in text.splitlines() if re.match(r"\| *\d", line)]
    found = [ROW.fullmatch(line) for line in lines]
    if None in found:
        raise ValueError(
            f"expected | number | a sentence. | tests |, got {lines[found.index(None)]}"
        )
    return [(int(row[1]), re.findall(r"`([^`]+)`", row[3])) for row in found if row]


def _run_always(paths: set[str]) -> set[str]:
    """Return the tests in these files that every run runs, at least in one case."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [*command, "-m", f"not ({NOT_IN_EVERY_RUN})", *sorted(paths)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    return {line.partition("[")[0] for line in found.stdout.splitlines() if "::" in line}


@cache
def _tests_of(path: str) -> frozenset[str]:
    """Return the test functions that the file defines."""
    file = ROOT / path
    tree = ast.parse(file.read_text("utf-8")) if file.is_file() else ast.Module([], [])
    names = (node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    return frozenset(name for name in names if name.startswith("test_"))


def _missing(tests: list[str]) -> list[str]:
    """Return the names that are not the `path::name` of an existing test."""
    return [test for test in tests if test.partition("::")[2] not in _tests_of(test.split("::")[0])]


def test_each_of_80_faults_has_tests_that_exist():
    rows = _rows(DOCUMENT.read_text("utf-8"))
    assert [number for number, _ in rows] == list(range(1, 81))
    assert not [number for number, tests in rows if not tests], "faults without a test"
    missing = {number: gone for number, tests in rows if (gone := _missing(tests))}
    assert not missing, "tests that are gone: name those that show these faults now"


def test_each_fault_has_a_test_in_every_run_and_the_others_are_marked():
    text = DOCUMENT.read_text("utf-8")
    rows = _rows(text)
    always = _run_always({test.partition("::")[0] for _, tests in rows for test in tests})
    assert not [number for number, tests in rows if always.isdisjoint(tests)]
    marked = set(re.findall(r"`([^`]+)` \(slow\)", text))
    assert marked == {test for _, tests in rows for test in tests} - always


def test_a_test_that_only_some_runs_run_is_found(tmp_path):
    file = tmp_path / "test_file.py"
    marks = ("slow", "tpu_compile", "skipif(False, reason='')")
    slow = "".join(f"@pytest.mark.{mark}\ndef test_{i}(): pass\n" for i, mark in enumerate(marks))
    cases = "@pytest.mark.parametrize('x', [0, pytest.param(1, marks=pytest.mark.slow)])"
    file.write_text(f"import pytest\n{slow}{cases}\ndef test_cases(x): pass\n")
    assert {name.partition("::")[2] for name in _run_always({str(file)})} == {"test_cases"}


@pytest.mark.parametrize(
    "test",
    ["tests/test_faults.py::test_gone", "tests/gone.py::test_x", "tests/test_faults.py", "test_x"],
)
def test_a_test_that_does_not_exist_is_found(test):
    here = "tests/test_faults.py::test_a_test_that_does_not_exist_is_found"
    assert _missing([here, test]) == [test]


def test_a_line_that_is_no_row_is_found():
    assert _rows("| 1 | It ends. | `a.py::test_b`<br>`c.py::test_d` |") == [
        (1, ["a.py::test_b", "c.py::test_d"])
    ]
    with pytest.raises(ValueError, match=r"expected \| number"):
        _rows("| 1 | It ends. |")
