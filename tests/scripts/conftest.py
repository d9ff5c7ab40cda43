"""Run scripts of the repository with tiny sizes."""

import sys
from collections.abc import Callable

import pytest
from numerics_helpers import ROOT, script


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Run `main` of a script, with arguments and other constants; return what it printed."""
    monkeypatch.chdir(ROOT)
    # scripts import each other
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])

    def run_and_read(name: str, *arguments: object, **constants: object) -> str:
        module = script(f"scripts/{name}")
        for constant, value in constants.items():
            monkeypatch.setattr(module, constant, value)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        module.main()
        return capsys.readouterr().out

    return run_and_read
