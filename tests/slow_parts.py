"""Option `--slow-part i/n`: one of n parts of the slow tests, and no other test.

So a few runs show what all slow tests show. The tests of each file are in the order of a hash, and
parts take them in turn. Thus all parts have a like share of every file, whatever the order of a
file's cases.
"""

import hashlib
from collections.abc import Sequence

import pytest


def slow_part(ids: Sequence[str], index: int, count: int) -> set[str]:
    """Return the ids of part `index` of `count`; all parts have every id once."""
    return set(sorted(ids, key=_place)[index::count])


def _place(test_id: str) -> tuple[str, str]:
    """A place among the tests of its file that does not depend on the other tests."""
    return test_id.partition("::")[0], hashlib.sha256(test_id.encode()).hexdigest()


def index_and_count(text: str) -> tuple[int, int]:
    """Read the value of `--slow-part`."""
    index, _, count = text.partition("/")
    if not (index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise pytest.UsageError(
            f"--slow-part: expected i/n with 0 <= i < n, got {text!r}. Write 0/10 to 9/10."
        )
    return int(index), int(count)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow-part", metavar="i/n", help="run part i of n of the slow tests only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (text := config.getoption("--slow-part")) is None:
        return
    slow = [item.nodeid for item in items if item.get_closest_marker("slow")]
    part = slow_part(slow, *index_and_count(text))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in part])
    items[:] = [item for item in items if item.nodeid in part]
