"""Rules for the files of the repository: content that no file may hold."""

import argparse
import ast
import json
import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from numerics_helpers import script

from noria.runtime.commands.command_line import command_parser

ROOT = Path(__file__).resolve().parent.parent
# Written in pieces, so that this file does not find itself.
FORBIDDEN = {
    "unfinished work": re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b"),
    "a path of somebody's machine": re.compile(
        r"(?<![\w.<{}-])/(home|Users|root|wo" + r"rk|tm" + r"p|opt)/\w"
    ),
    "the host of a package registry": re.compile(r"pypi\.o" + r"rg|pythonhost" + r"ed"),
}


def _tracked_text_files() -> dict[str, str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    texts = {}
    for name in filter(None, names.split("\0")):
        try:
            texts[name] = (ROOT / name).read_text(encoding="utf-8")
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # binary test data, or deleted and not yet committed
    return texts


def _find(kind: str, texts: dict[str, str]) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()[:120]}"
        for name, text in texts.items()
        for number, line in enumerate(text.splitlines(), start=1)
        if FORBIDDEN[kind].search(line)
    ]


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_no_file_holds(kind):
    found = _find(kind, _tracked_text_files())
    assert not found, f"{kind}:\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("unfinished work", "# TO" + "DO: later"),
        ("a path of somebody's machine", "open('/ho" + "me/me/model')"),
        ("the host of a package registry", "https://pypi.o" + "rg/simple"),
    ],
)
def test_a_forbidden_line_is_found(kind, line):
    assert _find(kind, {"a.py": f"fine\n{line}\n"}) == [f"a.py:2: {line}"]


def test_every_package_is_distributed():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    listed = tomllib.loads(text)["tool"]["setuptools"]["packages"]
    floors = ("modelzoo", "sharding", "compile", "runtime")
    found = [path.parent for floor in floors for path in (ROOT / floor).rglob("__init__.py")]
    names = [".".join(("noria", *path.relative_to(ROOT).parts)) for path in found]
    assert sorted(listed) == sorted(names)


def _imported_roots(path: Path) -> set[str]:
    roots = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            roots.add((node.module or "").partition(".")[0])
    return roots


def test_every_package_that_the_library_imports_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = [re.match(r"[\w-]+", line)[0] for line in requirements]
    declared = {name.partition("-")[0] for name in names} | {n.replace("-", "_") for n in names}
    floors = ("modelzoo", "sharding", "compile", "runtime")
    files = [path for floor in floors for path in (ROOT / floor).rglob("*.py")]
    imported = set().union(*map(_imported_roots, files)) - sys.stdlib_module_names
    assert imported <= declared, sorted(imported - declared)


@pytest.mark.parametrize("name", ["hello.jsonl", "mixed.jsonl"])
def test_the_lines_of_an_example_have_distinct_ids_and_a_known_url(name):
    lines = (ROOT / "examples" / name).read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert len({row["custom_id"] for row in rows}) == len(rows)
    assert {row["url"] for row in rows} <= {"/v1/chat/completions", "/v1/completions"}


def test_the_prompts_of_the_benchmark_are_what_their_script_writes():
    script = ROOT / "scripts" / "peers" / "workload.py"
    written = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=True
    ).stdout
    stored = ROOT / "benchmarks" / "workloads" / "peers64.jsonl"
    assert written == stored.read_text(encoding="utf-8")


def test_the_map_of_files_is_what_the_files_say():
    file_map = script("scripts/file_map.py")
    assert file_map.MAP.read_text("utf-8") == file_map.page(), "run scripts/file_map.py"


def test_the_table_of_models_is_what_families_and_cases_say():
    table = script("scripts/conformance_table.py")
    page = table.PAGE.read_text(encoding="utf-8")
    assert table.with_table(page) == page, "run scripts/conformance_table.py"


def test_the_reference_of_plans_is_what_the_dataclasses_say():
    reference = script("scripts/plan_reference.py")
    assert reference.PAGE.read_text("utf-8") == reference.page(), "run scripts/plan_reference.py"


def _missing_paths(text: str) -> list[str]:
    """Return paths between backticks that begin with a repository folder and do not exist."""
    words = [word for code in re.findall(r"`([^`\n]+)`", text) for word in code.split()]
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"build"}
    paths = [word for word in words if re.fullmatch(r"\w+/[\w./-]*(\.\w+|/)", word)]
    return [p for p in paths if p.partition("/")[0] in folders and not (ROOT / p).exists()]


def test_documents_name_paths_that_exist():
    names = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "benchmarks").glob("*.md")]
    names += (ROOT / "docs").rglob("*.md")
    found = {path: _missing_paths(path.read_text(encoding="utf-8")) for path in names}
    missing = {str(path.relative_to(ROOT)): gone for path, gone in found.items() if gone}
    assert not missing, missing


def test_a_path_that_is_gone_is_found():
    text = "`python tests/gone.py -x`, `runtime/`, `runtime/cli.py` and `elsewhere/gone.py`"
    assert _missing_paths(text) == ["tests/gone.py"]


def test_the_readmes_table_of_commands_has_all_of_them():
    table = re.findall(r"^\| `noria (\w+)", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE)
    (commands,) = (
        a for a in command_parser()._actions if isinstance(a, argparse._SubParsersAction)
    )
    assert sorted(table) == sorted(commands.choices)
