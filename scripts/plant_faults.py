"""Plant small faults in the library, one at a time, and record which tests see them.

A fault is a comparison turned, `and` for `or`, `+` for `-`, a number or truth value changed, a call
skipped, or two arguments swapped. Only code that computes is changed: no annotations, no texts, and
no checks of other code (`assert`, `strict=`, `frozen=`). The lines that can have a fault, in the
order of folders and files, are divided into equal runs, and one line of each is drawn. The faults
are a function of the seed and the source alone.

    python scripts/plant_faults.py draw --seed 41 --number 30
    python scripts/plant_faults.py list
    python scripts/plant_faults.py run 7 tests/runtime/rows
    python scripts/plant_faults.py explain 8 "No length is 0 here."
    python scripts/plant_faults.py tree 7 build/faulty

`draw` begins a record. `run` runs tests with a fault, up to the first that fails. It records this
test if it passes without the fault. Without tests, it runs the recorded one again. `tree` writes a
copy of the repository with the fault.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("modelzoo", "sharding", "compile", "runtime")
CHECKS = ("strict", "frozen")
"""Keywords that only refuse code which is wrong elsewhere."""
SYMMETRIC = ("max", "maximum", "min", "minimum")
OPPOSITE = {"<": "<=", ">": ">=", "==": "!=", "is": "is not", "in": "not in", "and": "or", "+": "-"}
TURNED = OPPOSITE | {turned: operator for operator, turned in OPPOSITE.items()}
OPERATOR = re.compile(r"is\s+not\b|not\s+in\b|\b(?:is|in|and|or)\b|[<>=!]=|[<>+-]")
SECONDS = 1800
"""The time after which tests with a fault count as failed."""


@dataclass(frozen=True)
class Fault:
    """One fault, and what is known of it."""

    path: str
    line: int
    kind: str
    before: str
    after: str
    test: str = ""
    message: str = ""
    is_added: bool = False
    """Whether the test was added for this fault."""
    reason: str = ""
    """The reason why the fault changes nothing."""

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}\n-{self.before}\n+{self.after}"


class Source:
    """The text of a file, with spans in bytes, as `ast` counts."""

    def __init__(self, text: str):
        self.bytes = text.encode()
        self.starts = [0, *accumulate(map(len, self.bytes.splitlines(keepends=True)))]

    def span(self, node: Any) -> tuple[int, int]:
        first = self.starts[node.lineno - 1] + node.col_offset
        return first, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, first: int, last: int) -> str:
        return self.bytes[first:last].decode()

    def fault(self, path: str, kind: str, first: int, last: int, new: str) -> Fault:
        """Return the fault that replaces a span, as whole lines."""
        line = sum(start <= first for start in self.starts)
        start, end = self.starts[line - 1], min(end for end in self.starts if end >= last) - 1
        after = self.text(start, first) + new + self.text(last, end)
        return Fault(path, line, kind, self.text(start, end), after)


def computing(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that compute: no annotations, no texts, and no checks of other code."""
    for name, field in ast.iter_fields(node):
        for child in field if isinstance(field, list) else [field]:
            if (
                isinstance(child, ast.AST)
                and name not in ("annotation", "returns")
                and not isinstance(child, ast.JoinedStr | ast.Assert)
                and getattr(child, "arg", None) not in CHECKS
            ):
                yield child
                yield from computing(child)


def edits(node: ast.AST, source: Source) -> Iterator[tuple[str, int, int, str]]:
    """Yield the kind of each fault of a node, the span that it replaces, and the new text."""
    match node:
        case ast.Compare(left=left, comparators=others):
            yield from turned("comparison", [left, *others], source)
        case ast.BoolOp(values=operands):
            yield from turned("and / or", operands, source)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            if not is_text(left) and not is_text(right):
                yield from turned("+ / -", [left, right], source)
        case ast.Constant(value=bool() as value):
            yield "constant", *source.span(node), repr(not value)
        case ast.Constant(value=int() | float() as value):
            new = value + 1 if isinstance(value, int) else 2 * value + 1
            yield "constant", *source.span(node), repr(new)
        case ast.Expr(value=ast.Call()):
            yield "call skipped", *source.span(node), "pass"
        case ast.Call(func=function, args=arguments):
            if ast.unparse(function).rpartition(".")[2] not in SYMMETRIC:
                yield from swapped(arguments, source)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def turned(
    kind: str, operands: Sequence[ast.AST], source: Source
) -> Iterator[tuple[str, int, int, str]]:
    """Yield the edits of the operators between operands."""
    for left, right in pairwise(operands):
        first, last = source.span(left)[1], source.span(right)[0]
        new = OPERATOR.sub(lambda x: TURNED[" ".join(x[0].split())], source.text(first, last), 1)
        yield kind, first, last, new


def swapped(arguments: Sequence[ast.AST], source: Source) -> Iterator[tuple[str, int, int, str]]:
    """Yield the swaps of neighbours among arguments."""
    for pair in pairwise(arguments):
        (first, end), (start, last) = map(source.span, pair)
        one, other = source.text(first, end), source.text(start, last)
        if one != other and not any(isinstance(x, ast.JoinedStr | ast.Starred) for x in pair):
            yield "arguments swapped", first, last, other + source.text(end, start) + one


def draw(sources: Mapping[str, str], number: int, seed: int) -> list[Fault]:
    """Draw faults evenly over the lines of sources that can have one."""
    lines: dict[tuple[int, int], list[Fault]] = defaultdict(list)
    for index, (path, text) in enumerate(sources.items()):
        source = Source(text)
        for node in computing(ast.parse(text)):
            for edit in edits(node, source):
                fault = source.fault(path, *edit)
                lines[index, fault.line].append(fault)
    places, generator, drawn = sorted(lines), random.Random(seed), []
    for index in range(number):
        line = lines[places[int((index + generator.random()) * len(places) / number)]]
        kind = generator.choice(sorted({fault.kind for fault in line}))
        drawn.append(generator.choice([fault for fault in line if fault.kind == kind]))
    return drawn


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
    (folder / "path" / "noria").mkdir(parents=True)
    for name in FOLDERS:
        (folder / "path" / "noria" / name).symlink_to(folder.resolve() / name)
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
    return found[1], found[2] or ""


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
        "<br>".join(f"`{line.strip()}`" for line in text.split("\n")).replace("|", "\\|")
        for text in (fault.before, fault.after)
    )
    test = f"`{fault.test}`{' (added)' if fault.is_added else ''}"
    last = test if fault.test else fault.reason or "unseen"
    return f"`{fault.path}`:{fault.line} | {fault.kind}:<br>{before}<br>{after} | {last}"


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
