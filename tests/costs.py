"""Option `--costs`: processor seconds of every test file, and memory maps of every process.

A process may map 65,530 pieces of memory (Linux), and a compiled program takes a few dozen.
"""

import os
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest

_MAPS = Path("/proc/self/maps")


def num_maps() -> int:
    """Return the number of memory maps of this process; 0 if it is unknown."""
    return _MAPS.read_bytes().count(b"\n") if _MAPS.exists() else 0


class Costs:
    """Sums the costs of tests, in one process or from all workers."""

    def __init__(self):
        self.seconds, self.maps = Counter[str](), {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        path, start = item.location[0], _processor_seconds()
        result = yield
        self.seconds[path] += _processor_seconds() - start
        if nextitem is None or nextitem.location[0] != path:
            worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
            self.maps[worker] = max(self.maps.get(worker, 0), num_maps())
        return result

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if output := getattr(session.config, "workeroutput", None):
            output["costs"] = dict(self.seconds), self.maps

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        seconds, maps = getattr(node, "workeroutput", {}).get("costs", ({}, {}))
        self.seconds.update(seconds)
        self.maps |= maps

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("costs")
        for path, seconds in self.seconds.most_common():
            terminalreporter.write_line(f"{seconds:8.1f} s  {path}")
        terminalreporter.write_line(f"{self.seconds.total():8.1f} s  in all")
        for worker, count in sorted(self.maps.items()):
            terminalreporter.write_line(f"{count:8d} memory maps at most in {worker}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--costs", action="store_true", help="print processor seconds a file, and memory maps"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--costs"):
        config.pluginmanager.register(Costs())


def _processor_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
