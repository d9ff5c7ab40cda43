"""Errors keep all that they say on their way between processes, and have their exit codes."""

import ast
import pickle
from pathlib import Path

import pytest

from noria.compile.graph_failures import GraphFailed
from noria.compile.graphs.graph_kinds import GraphKey
from noria.compile.grids.default_grid import ladder_grid
from noria.runtime import errors
from noria.runtime.errors import EXIT_BUILD, JobError, OtherConfiguration, RowError, UserError
from noria.runtime.files.layout_files import read_layout_table
from noria.sharding.layout import Layout
from noria.sharding.legality import IllegalLayout


@pytest.mark.parametrize(
    "error",
    [
        JobError("The graph does not compile.", EXIT_BUILD),
        OtherConfiguration("The journal is of another job.", {"rows": "part 0 of 1"}),
        RowError("invalid_request", "n: expected an integer, got 'x'.", "n"),
        GraphFailed(GraphKey("decode"), ladder_grid(64, 2, score=False), "does not compile"),
        IllegalLayout(Layout.from_table(read_layout_table("data-tensor")), ["one", "two"]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_pickled_whole(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))


CODES = {
    2: """BundleRequired BundleUnusable CacheUnusable ConfigError ForkedProcess InputError JobError
        InvalidTokenizer JournalError MergeError NoPlanFits OtherConfiguration OutputIsLocked
        RowError StartFailed UnusableFile UserError""",
    3: """CheckpointChanged CheckpointError CheckpointMismatch InvalidAdapter InvalidConfig
        InvalidGGUF InvalidOrbax InvalidQuantisation InvalidSafetensors ModelNotFound""",
    4: "OutOfMemory OutOfStep",
    75: "JournalWriteError",
}
"""The exit code of each error, if nothing else is said where it is raised."""
ROOT = Path(__file__).resolve().parents[2]
FLOORS = ("modelzoo", "sharding", "compile", "runtime")
OF_DEVELOPERS = {
    "compile/programs/collectives.py",  # a program that the parser does not know
    "compile/programs/hlo_text.py",
    "runtime/checkpoint/axis_pattern.py",  # patterns of families
    "runtime/checkpoint/loader.py",  # families that miss parameters
    "runtime/checkpoint/orbax_store.py",  # turned into InvalidOrbax beside it
    "runtime/checkpoint/tensor_source.py",  # turned into CheckpointMismatch
    "runtime/text/template_child.py",  # a process that imports nothing of noria
}
"""Files with ValueErrors that no user sees, unless the code is wrong."""


@pytest.mark.parametrize(("code", "names"), [(c, n) for c, x in CODES.items() for n in x.split()])
def test_an_error_of_users_has_its_exit_code(code, names):
    kind = getattr(errors, names)
    arguments = {RowError: ("invalid_request", "n"), OtherConfiguration: ("x", {})}
    assert errors.exit_code(kind(*arguments.get(kind, ("x",)))) == code


def test_every_error_has_its_code_here():
    named = {name for names in CODES.values() for name in names.split()}
    kinds = (x for x in vars(errors).values() if isinstance(x, type) and issubclass(x, Exception))
    assert {kind.__name__ for kind in kinds} - {"_WithExitCode"} == named
    assert issubclass(UserError, ValueError)


def test_checks_of_what_users_give_raise_no_plain_value_error():
    files = {path for floor in FLOORS for path in (ROOT / floor).rglob("*.py")}
    plain = {
        path.relative_to(ROOT).as_posix()
        for path in files
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if "ValueError" in _raised(node)
    }
    assert plain == OF_DEVELOPERS | {"modelzoo/errors.py"}


def _raised(node: ast.AST) -> set[str]:
    """Return the exception that a statement raises, or the bases of a class."""
    made = node.exc.func if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) else None
    bases = node.bases if isinstance(node, ast.ClassDef) else ()
    return {x.id for x in (made, *bases) if isinstance(x, ast.Name)}
