"""The tables of `docs/faults.md`: 80 faults, each with a sentence and tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "faults.md"
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
