"""The code blocks of the documentation: each is parsed, read or run as what it says it is.

Blocks that are no code are marked as `text`: sample output, of which the commands are parsed too.
A python block below the comment `<!-- run -->` is run.
"""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from noria.compile.compiler_options import read_options
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.hardware.hardware import read_hardware
from noria.compile.plan import Plan
from noria.runtime.commands.command_line import command_parser
from noria.runtime.stages.pipeline_file import pipeline_from
from noria.sharding.layout import Layout

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
TABLES = {kind.NAME: kind for kind in (*Plan.TABLES, *BucketGrid.TABLES)}
RUN = "<!-- run -->"
_FENCE = re.compile(r" *```")


class Block(NamedTuple):
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    text: str
    is_run: bool = False

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def _blocks(page: str, text: str) -> Iterator[Block]:
    """All fenced blocks of a page; ValueError for one that does not end."""
    lines = text.splitlines()
    start: int | None = None
    for index, line in enumerate(lines):
        if not _FENCE.match(line):
            continue
        if start is None:
            start = index
            continue
        indent = len(lines[start]) - len(lines[start].lstrip())
        body = "\n".join(line[indent:] for line in lines[start + 1 : index])
        language = lines[start].strip().removeprefix("```")
        is_run = start > 0 and lines[start - 1].strip() == RUN
        yield Block(page, start + 1, language, body, is_run)
        start = None
    if start is not None:
        raise ValueError(f"{page}:{start + 1}: expected an end of the block.")


BLOCKS = [
    block
    for path in PAGES
    for block in _blocks(path.relative_to(ROOT).as_posix(), path.read_text("utf-8"))
]


def _check_python(block: Block) -> None:
    compile(block.text, str(block), "exec")


def _check_bash(block: Block) -> None:
    for line in _commands(block.text):
        _check_command(line)


def _check_text(block: Block) -> None:
    """Check the commands of sample output, which stand after a prompt."""
    for line in _commands(block.text):
        if line.startswith("$ "):
            _check_command(line[2:])


def _commands(text: str) -> list[str]:
    """Lines, with those that end in a backslash joined to the next."""
    return re.sub(r" *\\\n\s*", " ", text).splitlines()


def _check_command(line: str) -> None:
    """Raise ValueError for a command of noria that its parser refuses, or a script that is gone."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # variables of the environment
        del words[0]
    if words[:1] == ["noria"]:
        try:
            command_parser().parse_args([word for word in words[1:] if word != "&"])
        except SystemExit as end:
            if end.code:
                raise ValueError(f"expected a command that noria understands, got {line}") from None
    for word in words:
        if re.match(r"(\./)?(scripts|tests|examples)/", word) and not (ROOT / word).exists():
            raise ValueError(f"expected a file of the repository, got {word} in {line}")


def _check_json(block: Block) -> None:
    for line in block.text.splitlines():
        json.loads(line)


def _check_toml(block: Block) -> None:
    _read_tables(tomllib.loads(block.text))


def _read_tables(table: Mapping[str, Any]) -> None:
    """Read the tables of a plan, a layout or hardware as noria does; ValueError for others."""
    if "schema" in table:
        Plan.from_table(table)
    elif "mesh" in table:
        Layout.from_table(table)
    elif table and all(isinstance(inner, dict) and "flops" in inner for inner in table.values()):
        read_hardware(table)
    elif len(table) == 1 and (name := next(iter(table))) in TABLES:
        TABLES[name].from_table(table[name])
    elif set(table) == {"compiler"}:
        read_options(table["compiler"])
    elif set(table) == {"stages"}:
        pipeline_from(Path("stages.toml"), table)
    else:
        raise ValueError(f"expected a plan, a layout, hardware or one table, got {list(table)}.")


CHECKS: Mapping[str, Callable[[Block], None]] = {
    "python": _check_python,
    "bash": _check_bash,
    "toml": _check_toml,
    "json": _check_json,
    "text": _check_text,
}


def _check(block: Block) -> None:
    if block.language not in CHECKS:
        raise ValueError(
            f"{block}: expected a block of {', '.join(CHECKS)}, got {block.language!r}."
        )
    if block.is_run and block.language != "python":
        raise ValueError(f"{block}: expected a python block below {RUN}.")
    try:
        CHECKS[block.language](block)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{block}: {error}") from error


@pytest.mark.parametrize("page", sorted({block.page for block in BLOCKS}))
def test_every_block_of_a_page_is_what_it_says(page):
    for block in BLOCKS:
        if block.page == page:
            _check(block)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.is_run], ids=str)
def test_a_block_that_is_marked_runs(block):
    exec(compile(block.text, str(block), "exec"), {"__name__": "__main__"})


def test_blocks_of_every_language_and_some_that_run_are_found():
    assert {block.language for block in BLOCKS} == set(CHECKS)
    assert sum(block.is_run for block in BLOCKS) >= 2


@pytest.mark.parametrize(
    ("language", "text", "message"),
    [
        ("python", "if", "expected ':'|invalid syntax"),
        ("bash", "noria batch -i a -o b --model M --nonsense", "a command that noria understands"),
        ("bash", "JAX_PLATFORMS=cpu noria bench \\\n  --nonsense", "a command that noria"),
        ("bash", "./scripts/gone", "a file of the repository"),
        ("text", "$ noria gone\nfine", "a command that noria understands"),
        ("toml", "a = ", "Invalid value"),
        ("toml", 'name = "x"\n[mesh]\ndata = 2\n[rulez]\nbatch = "data"', "rulez"),
        ("toml", "schema = 3\nnonsense = 1", "nonsense"),
        ("toml", "[experts]\nnonsense = 1", "nonsense"),
        ("toml", "[nonsense]\nx = 1", "expected a plan, a layout"),
        ("json", "{'a': 1}", "property name"),
        ("", "noria", "expected a block of"),
        ("console", "noria", "expected a block of"),
    ],
)
def test_a_wrong_block_is_found(language, text, message):
    (block,) = _blocks("page.md", f"\n```{language}\n{text}\n```\n")
    with pytest.raises(ValueError, match=message) as found:
        _check(block)
    assert str(found.value).startswith("page.md:2: ")


def test_a_block_in_a_list_and_its_mark_are_found():
    text = f"1. Run:\n\n   {RUN}\n   ```python\n   x = 1\n   if x:\n       pass\n   ```\n"
    (block,) = _blocks("page.md", text)
    assert block == Block("page.md", 4, "python", "x = 1\nif x:\n    pass", True)
    with pytest.raises(ValueError, match="expected an end"):
        list(_blocks("page.md", "```python\n"))


def test_markdown_lines_are_at_most_120_characters_long():
    long = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in PAGES
        if path.name not in ("map.md", "faults.md", "plan_file.md")
        for number, line in enumerate(_prose(path.read_text("utf-8")), start=1)
        if len(line) > 120
    ]
    assert not long, long


def _prose(text: str) -> list[str]:
    """The lines, with those of blocks, tables and pictures emptied, as they cannot be broken."""
    inside, lines = False, []
    for line in text.splitlines():
        inside ^= bool(_FENCE.match(line))
        lines.append("" if inside or line.startswith(("|", "![")) else line)
    return lines


def test_the_readme_is_at_most_250_lines_long():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 250


@pytest.mark.site
def test_the_site_is_built_without_a_warning(tmp_path):
    if importlib.util.find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed; the extra `dev` brings it")
    # without --quiet, with which mkdocs counts no warnings
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    report = (tmp_path / "benchmarks" / "planner" / "index.html").read_text("utf-8")
    assert "Planned buckets" in report
