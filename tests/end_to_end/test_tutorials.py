"""The tutorials on layouts and buckets: commands that plan are followed word for word.

A folder has nothing but `benchmarks/` and `examples/`, which the pages name. Each block of a page
is saved or run as the page says, and the lines that it shows are among those that are printed.
Seconds of a search are left out of the comparison.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs/tutorials"


class Step(NamedTuple):
    """A file to save, or a command with the lines that it prints."""

    section: str
    command: str = ""
    shown: tuple[str, ...] = ()
    file: str = ""
    content: str = ""


def steps_of(page: str) -> Iterator[Step]:
    """All files and commands of a page, in order."""
    text = (TUTORIALS / f"{page}.md").read_text("utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    for section in sections:
        title, prose = section.partition("\n")[0], section
        for match in re.finditer(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
            language, body = match.groups()
            prose = section[: match.start()]
            if language == "toml" and (named := re.findall(r"Save this as `(\S+)`:\n\n$", prose)):
                yield Step(title, file=named[0], content=body)
            elif language == "bash":
                for command in _joined(body):
                    yield Step(title, command)
            elif language == "text" and body.startswith("$ "):
                for part in re.split(r"^\$ ", _joined_text(body), flags=re.MULTILINE)[1:]:
                    command, *shown = part.splitlines()
                    yield Step(title, command, tuple(shown))


def _joined_text(body: str) -> str:
    return re.sub(r" *\\\n\s*", " ", body)


def _joined(body: str) -> list[str]:
    return [line for line in _joined_text(body).splitlines() if line]


def key_line(line: str) -> str:
    """Return a line without the seconds of a search."""
    return " ".join(re.sub(r"; [\d.]+ s$", "", line).split())


def follow(steps: list[Step], folder: Path) -> None:
    """Do the steps in a folder, and compare what is printed."""
    folder.mkdir()
    for name in ("benchmarks", "examples"):
        (folder / name).symlink_to(ROOT / name)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for step in steps:
        if step.file:
            (folder / step.file).write_text(step.content, "utf-8")
        else:
            done = subprocess.run(
                ["bash", "-c", step.command],
                cwd=folder,
                env={**os.environ, "PATH": path},
                capture_output=True,
                text=True,
                check=False,
            )
            printed = done.stdout + done.stderr
            assert done.returncode == 0, f"{step.command}\n{printed}"
            lines = {key_line(line) for line in printed.splitlines()}
            missing = [line for line in step.shown if key_line(line) not in lines]
            assert not missing, f"{step.command}\nlacks {missing}\n{printed}"


def test_a_workload_is_planned_as_the_tutorial_shows(tmp_path):
    steps = [step for step in steps_of("choose_buckets") if step.section < "3"]
    assert [step.command.split()[0] for step in steps] == ["head", "noria"]
    assert sum(len(step.shown) for step in steps) > 25
    follow(steps, tmp_path / "empty")


@pytest.mark.parametrize("page", ["choose_buckets", "try_a_layout"])
def test_a_tutorial_reads_only_files_that_are_there_or_that_it_wrote(page):
    there: set[str] = set()
    read = re.compile(
        r"-(?:i|-workload|-plan|-layouts?|-calibration|-model) (?:\"([^\"]+)\"|(\S+))"
    )
    written = re.compile(r"-(?:o|-calibration|-report) (\S+)")
    num_files = 0
    for step in steps_of(page):
        if step.file:
            there.add(step.file)
        if step.command.startswith("noria bench"):
            there.update(written.findall(step.command))
        options = read.findall(step.command) if step.command.startswith("noria") else []
        for name in " ".join(map("".join, options)).split():
            if "/" in name:
                assert (ROOT / name).exists(), step
            elif Path(name).suffix:
                assert name in there, step
            num_files += bool("/" in name or Path(name).suffix)
        there.update(written.findall(step.command))
    assert num_files > 5


def test_a_line_that_differs_is_found(tmp_path):
    follow([Step("1", "printf 'rows  7 of 8; 1.5 s'", ("rows 7 of 8; 16 s",))], tmp_path / "same")
    with pytest.raises(AssertionError, match="lacks"):
        follow([Step("1", "echo rows 7", ("rows 8",))], tmp_path / "other")
    with pytest.raises(AssertionError, match="no-such-command"):
        follow([Step("1", "no-such-command")], tmp_path / "failed")
