"""Structure for newcomers: few files at a folder's root, no import cycles, whole sentences."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("modelzoo", "sharding", "compile", "runtime")
CLAUSES = {"How", "Of", "What", "Where", "Those"}
MAX_FILES = {"runtime": 7}
"""Upper bound for the number of files at a folder's root; other files belong in subfolders."""

MAX_LINES, MAX_PARAMETERS = 60, 7
"""Upper bounds for the lines and the parameters of a function."""
LONG: set[str] = set()
"""Functions with more lines; this set only shrinks."""
WIDE = {
    "compile/graphs/prefill_steps.py::score_step",
    "runtime/comparison/compare.py::compare",
    "runtime/llm.py::__init__",
}
"""Functions with more parameters; this set only shrinks."""
MAX_SPLATS = 15
"""Upper bound for the calls that splat a tuple of their own function; it only shrinks."""
WIDE_CALLS: set[str] = set()
"""Functions with such a call of more arguments than `MAX_PARAMETERS`; this set only shrinks."""
PARSES = ("runtime/commands", "runtime/cli.py")
"""The places that may import argparse: everything below them takes options with types."""


def sources(*folders: str) -> dict[Path, str]:
    """Return the text of every Python file below some folders, by its path in the repository."""
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT): path.read_text(encoding="utf-8") for path in paths}


def imported(source: str, path: Path, files: set[Path]) -> set[Path]:
    """Return the files that a file imports: at its top, inside functions, or only for types."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        package = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
        for alias in node.names:
            names = (package / f"{alias.name}.py", package.parent / f"{package.name}.py")
            found |= {next((name for name in names if name in files), package / "__init__.py")}
    return (found & files) - {path}


def cycle(texts: dict[Path, str]) -> list[Path]:
    """Return the files of one import cycle; none if there is no cycle."""
    files = set(texts)
    graph = {path: imported(text, path, files) for path, text in texts.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def clauses(source: str) -> Iterator[str]:
    """Yield the docstrings of modules, classes, functions and attributes that begin as a clause."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Constant):
            continue
        text = node.value.value
        if isinstance(text, str) and text.split(maxsplit=1)[:1] and text.split()[0] in CLAUSES:
            yield f"{node.lineno}: {text.splitlines()[0]}"


def functions(source: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name, the number of lines and the number of parameters of every function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            given = node.args
            names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            count = len(names) - (names[:1] in (["self"], ["cls"]))
            yield node.name, (node.end_lineno or 0) - node.lineno + 1, count


def own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of the functions inside it."""
    for node in ast.iter_child_nodes(function):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from own_nodes(node)


def tuples(nodes: list[ast.AST]) -> dict[str, int]:
    """Return the number of elements of each name that is assigned from a tuple display."""
    found = {}
    for node in nodes:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for name, value in pairs:
                if isinstance(name, ast.Name) and isinstance(value, ast.Tuple):
                    found[name.id] = len(value.elts)
    return found


def splats(source: str) -> Iterator[tuple[str, int, int]]:
    """Yield function, line and number of arguments of calls that splat a tuple made beside them."""
    for function in ast.walk(ast.parse(source)):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        nodes = list(own_nodes(function))
        sizes = tuples(nodes)
        for call in (node for node in nodes if isinstance(node, ast.Call)):
            starred = [x.value for x in call.args if isinstance(x, ast.Starred)]
            names = [x.id for x in starred if isinstance(x, ast.Name) and x.id in sizes]
            own = [sizes[name] for name in names]
            own += [len(x.elts) for x in starred if isinstance(x, ast.Tuple)]
            if own:
                count = len(call.args) + len(call.keywords) - len(own) + sum(own)
                yield function.name, call.lineno, count


def test_calls_name_their_arguments():
    found, wide = [], set()
    for path, text in sources(*FLOORS).items():
        for name, line, num_arguments in splats(text):
            found.append(f"{path.as_posix()}:{line} {name}: {num_arguments} arguments")
            wide |= {f"{path.as_posix()}::{name}"} if num_arguments > MAX_PARAMETERS else set()
    print("\n".join(found))
    assert len(found) <= MAX_SPLATS, "\n".join(found)
    assert wide == WIDE_CALLS


@pytest.mark.parametrize(
    "body",
    [
        "given = a, b\n    f(1, *given, x=2)",
        "given, c = (a, b), 3\n    f(1, *given, x=2)",
        "f(1, *(a, b), x=2)",
    ],
)
def test_a_splatted_tuple_counts_as_its_elements(body):
    (found,) = splats(f"def g(a, b, *rest):\n    {body}\n    f(*rest)")
    assert found[2] == 4
    assert not list(splats("def g(given):\n    def h():\n        given = 1, 2\n    f(*given)"))


def test_functions_are_short_and_take_few_parameters():
    long, wide = set(), set()
    for path, text in sources(*FLOORS).items():
        for name, num_lines, num_parameters in functions(text):
            long |= {f"{path.as_posix()}::{name}"} if num_lines > MAX_LINES else set()
            wide |= {f"{path.as_posix()}::{name}"} if num_parameters > MAX_PARAMETERS else set()
    assert long == LONG
    assert wide == WIDE


def test_a_long_and_a_wide_function_are_found():
    body = "\n".join(["    x = 1"] * MAX_LINES)
    parameters = ", ".join("abcdefgh")
    (long,) = functions(f"def f(self, a):\n{body}")
    (wide,) = functions(f"def g(self, *, {parameters}): pass")
    assert long == ("f", MAX_LINES + 1, 1) and wide == ("g", 1, MAX_PARAMETERS + 1)


def test_options_have_types_below_the_commands():
    texts = sources(*FLOORS)
    parsing = {path.as_posix() for path, text in texts.items() if "import argparse" in text}
    assert all(path.startswith(PARSES) for path in parsing) and len(parsing) > 5


def test_no_files_import_each_other_in_a_circle():
    assert not cycle(sources(*FLOORS))


@pytest.mark.parametrize(
    "importing",
    [
        "from .b import x",
        "def f():\n    from .b import x",
        "if TYPE_CHECKING:\n    from . import b",
        "from ..runtime.b import x",
    ],
)
def test_a_circle_is_found(importing):
    a, b = Path("runtime/a.py"), Path("runtime/b.py")
    assert set(cycle({a: importing, b: "from .a import y"})) == {a, b}


@pytest.mark.parametrize("folder", MAX_FILES)
def test_files_stand_in_rooms(folder):
    names = sorted(path.name for path in (ROOT / folder).glob("*.py"))
    assert len(names) <= MAX_FILES[folder], names


def test_docstrings_begin_as_sentences():
    texts = sources(*FLOORS, "scripts", "examples", "tests")
    found = [f"{path}:{line}" for path, text in texts.items() for line in clauses(text)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        '"""What a file does."""',
        'def f():\n    """Of each row."""',
        'class A:\n    x: int\n    """Those of the phase."""',
    ],
)
def test_a_clause_is_found(source):
    assert len(list(clauses(source))) == 1
