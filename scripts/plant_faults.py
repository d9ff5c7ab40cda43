"""Plant small faults in the library, one at a time, and record which tests see them.

    python scripts/plant_faults.py draw --seed 41 --number 30
    python scripts/plant_faults.py list
    python scripts/plant_faults.py run 7 tests/runtime/rows
    python scripts/plant_faults.py explain 8 "No length is 0 here."
    python scripts/plant_faults.py tree 7 build/faulty

`draw` begins a record. `run` runs tests with a fault, up to the first that fails. It records this
test if it passes without the fault. Without tests, it runs the recorded one again. `tree` writes a
copy of the repository with the fault. `small_faults.py` says which faults there are.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from small_faults import Fault, draw

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("modelzoo", "sharding", "compile", "runtime")
SECONDS = 1800
"""The time after which tests with a fault count as failed."""


def plant(fault: Fault, text: str) -> str:
    """Return the text of a file with a fault, in the nearest lines that are as they were."""
    lines, before = text.split("\n"), fault.before.split("\n")
    places = [i for i in range(len(lines)) if lines[i : i + len(before)] == before]
    if not places:
        raise SystemExit(f"expected the lines of this fault, got other ones; draw again:\n{fault}")
    place = min(places, key=lambda i: abs(i + 1 - fault.line))
    lines[place : place + len(before)] = fault.after.split("\n")
    return "\n".join(lines)


def copy_tree(folder: Path, fault: Fault | None) -> None:
    """Copy the repository with a fault. `noria` is imported from the copy through `path`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    package = folder / "path" / "noria"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"__path__ = [{str(folder.resolve())!r}]\n", "utf-8")
    if fault is not None:
        file = folder / fault.path
        file.write_text(plant(fault, file.read_text("utf-8")), "utf-8")


def first_failure(fault: Fault | None, tests: Sequence[str]) -> tuple[str, str] | None:
    """Run tests in a copy with a fault; return the first that fails, and its message."""
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy_tree(Path(folder), fault)
        cache = f"cache_dir={ROOT / '.pytest_cache'}"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-o", cache, *tests]
        options: Any = {"cwd": folder, "capture_output": True, "text": True, "timeout": SECONDS}
        options["env"] = os.environ | {"PYTHONPATH": f"{folder}/path", "COLUMNS": "300"}
        try:
            run = subprocess.run(command, **options)
        except subprocess.TimeoutExpired:
            return " ".join(tests), f"no end within {SECONDS} s"
    if run.returncode == 0:
        return None
    found = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - (.*))?$", run.stdout, re.MULTILINE)
    if found is None:
        raise SystemExit(f"expected tests that run, got:\n{run.stdout}\n{run.stderr}")
    # the folders of paths differ between machines
    return found[1], re.sub(r"/\S*/", "", found[2] or "")


def seen(fault: Fault, tests: Sequence[str], is_added: bool) -> Fault:
    """Return a fault with the first test that fails with it, and passes without it."""
    failure = first_failure(fault, tests or [fault.test])
    if failure is None:
        print("no test fails")
        return fault
    test, message = failure
    if other := first_failure(None, [test]):
        raise SystemExit(f"expected {test} to pass without the fault, got: {other[1]}")
    print(f"{test}: {message}")
    return replace(fault, test=test, message=message, is_added=is_added)


def markdown(record: Mapping[str, Any]) -> str:
    """Return a record as a Markdown page."""
    faults = [Fault(**one) for one in record["faults"]]
    added = sum(fault.is_added for fault in faults)
    before = sum(bool(fault.test) for fault in faults) - added
    nothing = sum(bool(fault.reason) for fault in faults)
    lines = [
        "# Faults planted in the library, and the tests that see them",
        "",
        f"`scripts/plant_faults.py` drew {len(faults)} faults with seed {record['seed']} from "
        f"commit {record['commit'][:8]}, and planted one at a time.",
        f"The tests that run by default saw {before} of them before any test was added. Added "
        f"tests see {added} more. {nothing} change nothing.",
        "Each test passes without its fault.",
        "",
        "| | line | fault | seen by |",
        "|--:|---|---|---|",
        *(f"| {number} | {cells(fault)} |" for number, fault in enumerate(faults, start=1)),
    ]
    return "\n".join(lines) + "\n"


def cells(fault: Fault) -> str:
    """Return the cells of a fault: its place, its lines, and its test or reason."""
    before, after = (
        "<br>".join(f"`{line.strip()}`" for line in text.split("\n"))
        for text in (fault.before, fault.after)
    )
    test = f"`{fault.test}`{' (added)' if fault.is_added else ''}"
    last = test if fault.test else fault.reason or "unseen"
    row = f"`{fault.path}`:{fault.line}", f"{fault.kind}:<br>{before}<br>{after}", last
    return " | ".join(cell.replace("|", "\\|") for cell in row)


def main() -> None:
    options = parser().parse_args()
    if options.task == "draw":
        files = [file for name in FOLDERS for file in sorted((ROOT / name).rglob("*.py"))]
        sources = {str(file.relative_to(ROOT)): file.read_text("utf-8") for file in files}
        faults = draw(sources, options.number, options.seed)
        commit = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip()
        record = {"seed": options.seed, "commit": commit}
    else:
        record = json.loads(options.record.read_text("utf-8"))
        faults = [Fault(**one) for one in record["faults"]]
    if options.task in ("draw", "list"):
        print(*(f"{number}. {fault}" for number, fault in enumerate(faults, start=1)), sep="\n")
    else:
        faults[options.fault - 1] = changed(faults[options.fault - 1], options)
    record["faults"] = [asdict(fault) for fault in faults]
    options.record.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    options.record.with_suffix(".md").write_text(markdown(record), "utf-8")


def changed(fault: Fault, options: argparse.Namespace) -> Fault:
    """Do a task with one fault, and return it with what is known after that."""
    if options.task == "tree":
        copy_tree(options.folder, fault)
        return fault
    if options.task == "explain":
        return replace(fault, reason=options.reason)
    return seen(fault, options.tests, options.added or fault.is_added)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Plant faults, and record which tests see them.")
    parser.add_argument("--record", type=Path, default=ROOT / "benchmarks" / "planted_faults.json")
    tasks = parser.add_subparsers(dest="task", required=True)
    drawing = tasks.add_parser("draw")
    drawing.add_argument("--seed", type=int, default=41)
    drawing.add_argument("--number", type=int, default=30)
    tasks.add_parser("list")
    running, explaining, writing = (tasks.add_parser(task) for task in ("run", "explain", "tree"))
    for task in (running, explaining, writing):
        task.add_argument("fault", type=int, help="its number in the record")
    running.add_argument("tests", nargs="*")
    running.add_argument("--added", action="store_true", help="the test was added for this fault")
    explaining.add_argument("reason", help="why the fault changes nothing")
    writing.add_argument("folder", type=Path, help="a new folder")
    return parser


if __name__ == "__main__":
    main()
