"""Rules for the library's folders, checked on syntax trees: allowed imports, and allowed I/O.

`modelzoo <- sharding <- compile <- runtime`: a folder imports itself and the folders to its left.
The places inside a folder, its files and its own folders, have an order, too. Inside the library
imports are relative; only `compile` lowers; only `runtime` does I/O.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FLOORS = ("modelzoo", "sharding", "compile", "runtime")
PLACES = {
    "modelzoo": """errors cpu axes config_values moe_config pooling_config rope_config latent_config
        weights rope structure layer_config config layer_groups cache operations attention kernels
        sampling_parameters sampling layers pooling moe layer_scan gqa mla block decoder products
        families""",
    "compile": """monitor gpu_kinds device_kinds plan_tables weight_rules plan_evidence target_names
        hardware grids abstract_model attention_kernels graphs compiled_graphs compiler_options
        graph_failures programs program_cache targets expert_plan planning build plan
        layout_measure""",
    "runtime": """console errors files parameters embedding process devices structured request pods
        text checkpoint engine adapters plans progress quantisation bundles session layouts rows
        comparison planning llm batch evaluation stages commands cli __init__""",
}
"""The order of places: one imports those before it, also inside a function or for a type."""
ONLY_TYPES = {
    ("modelzoo/operations.py", "attention"),
    ("modelzoo/operations.py", "moe"),
    ("modelzoo/layers.py", "moe"),
    ("compile/grids/default_grid.py", "planning"),
}
"""Files that name types of a place after theirs; this set only shrinks."""
WORLD_MODULES = {"socket", "subprocess", "shutil", "sys", "tempfile", "urllib"}
HARMLESS_OS = {"cpu_count"}
WORLD_CALLS = {"open", "print", "input"}
WORLD_METHODS = {"read_text", "read_bytes", "write_text", "write_bytes"}
EXCEPTIONS = {
    # libtpu reads the setting only from the environment, and this module loads libtpu
    ("compile/targets.py", "uses os.environ; only runtime touches the world"),
    # the TPU's compiler gives some programs only as files, and this module reads them
    ("compile/programs/program_text.py", "imports 'tempfile'; only runtime touches the world"),
    ("compile/programs/program_text.py", "calls .read_text(); only runtime touches the world"),
}


def violations(source: str, path: Path) -> list[str]:
    """Return where the file at `path` (relative to the root) breaks the rules of its floor."""
    floor = path.parts[0]
    found = [
        (node.lineno, problem)
        for node in ast.walk(ast.parse(source))
        for problem in (*_import_problems(node, path), *_effect_problems(node, floor))
        if (path.as_posix(), problem) not in EXCEPTIONS
    ]
    return [f"{path}:{line}: {problem}" for line, problem in sorted(found)]


def _import_problems(node: ast.AST, path: Path) -> Iterator[str]:
    names: list[str] = []
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        names = [node.module or ""]
    for name in names:
        if name.split(".")[0] in {*FLOORS, "noria"}:
            yield f"imports {name!r} absolutely; inside the library imports are relative"
    if isinstance(node, ast.ImportFrom) and node.level > 0:
        for floor in _imported_floors(node, path):
            if floor not in FLOORS:
                yield f"imports {floor!r} from above the four floors"
            elif FLOORS.index(floor) > FLOORS.index(path.parts[0]):
                yield f"{path.parts[0]} imports {floor}; allowed: {' <- '.join(FLOORS)}"
        yield from _place_problems(node, path)


def _place_problems(node: ast.ImportFrom, path: Path) -> Iterator[str]:
    order = PLACES.get(path.parts[0], "").split()
    place = path.parts[1].removesuffix(".py")
    if place not in order:
        return
    for module in _imported_modules(node, path):
        if (
            module[0] != path.parts[0]
            or len(module) < 2
            or (path.as_posix(), module[1]) in ONLY_TYPES
        ):
            continue
        if module[1] in order and order.index(module[1]) > order.index(place):
            yield f"{place} imports {module[1]}, which comes after it in the order of {module[0]}"


def _imported_floors(node: ast.ImportFrom, path: Path) -> list[str]:
    """`from ..sharding.rules import x` in modelzoo/a.py -> ["sharding"]."""
    return sorted({module[0] for module in _imported_modules(node, path)})


def _imported_modules(node: ast.ImportFrom, path: Path) -> list[tuple[str, ...]]:
    """`from . import a, b` in runtime/batch/c.py -> [(runtime, batch, a), (runtime, batch, b)]."""
    package = path.parts[:-1]
    base = package[: len(package) - (node.level - 1)]
    if len(package) < node.level - 1:
        return [(".",)]
    if node.module:
        return [(*base, *node.module.split("."))]
    return [(*base, alias.name) for alias in node.names]


def _effect_problems(node: ast.AST, floor: str) -> Iterator[str]:
    if isinstance(node, ast.Call) and _lowers(node) and floor != "compile":
        yield "lowers a function; only compile does"
    if floor == "runtime":
        return
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] in WORLD_MODULES:
                yield f"imports {alias.name!r}; only runtime touches the world"
    if isinstance(node, ast.ImportFrom) and node.level == 0:
        module = (node.module or "").split(".")[0]
        if module in {*WORLD_MODULES, "os"}:
            yield f"imports from {module!r}; only runtime touches the world"
    if (
        isinstance(node, ast.Attribute)
        and ast.unparse(node.value) == "os"
        and node.attr not in HARMLESS_OS
    ):
        yield f"uses os.{node.attr}; only runtime touches the world"
    if isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id in WORLD_CALLS:
            yield f"calls {node.func.id}(); only runtime touches the world"
        if isinstance(node.func, ast.Attribute) and node.func.attr in WORLD_METHODS:
            yield f"calls .{node.func.attr}(); only runtime touches the world"


def _lowers(call: ast.Call) -> bool:
    """`graph.lower(x)` lowers; `text.lower()`, without arguments, is about letters."""
    function = call.func
    has_arguments = bool(call.args or call.keywords)
    return isinstance(function, ast.Attribute) and function.attr == "lower" and has_arguments


def _library_files() -> list[Path]:
    return sorted(
        path.relative_to(ROOT) for floor in FLOORS for path in (ROOT / floor).rglob("*.py")
    )


def test_every_floor_has_files():
    assert {path.parts[0] for path in _library_files()} == set(FLOORS)


@pytest.mark.parametrize("floor", PLACES)
def test_every_place_has_its_place_in_the_order(floor):
    here = {
        path.parts[1].removesuffix(".py") for path in _library_files() if path.parts[0] == floor
    }
    assert here - {"__init__"} == set(PLACES[floor].split()) - {"__init__"}


def test_every_file_that_names_types_of_a_later_place_does_so():
    for file, place in ONLY_TYPES:
        text = (ROOT / file).read_text(encoding="utf-8")
        assert "if TYPE_CHECKING:" in text and f".{place}." in text


@pytest.mark.parametrize("path", _library_files(), ids=str)
def test_the_file_keeps_to_its_floor(path):
    found = violations((ROOT / path).read_text(encoding="utf-8"), path)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("modelzoo/a.py", "from ..sharding.axis_rules import AxisRules"),
        ("modelzoo/families/a.py", "from ...runtime import request"),
        ("sharding/a.py", "from .. import compile"),
        ("compile/a.py", "def f():\n    from ..runtime.request import Request"),
        ("runtime/a.py", "import noria.modelzoo"),
        ("runtime/a.py", "from noria.modelzoo.config import DecoderConfig"),
        ("runtime/a.py", "from ...elsewhere import x"),
        ("sharding/a.py", "import compile"),
        ("sharding/a.py", "from modelzoo import config"),
        ("sharding/a.py", "jax.jit(f).lower(x)"),
        ("modelzoo/a.py", "print('hello')"),
        ("compile/a.py", "with open('f') as file: pass"),
        ("compile/a.py", "path.read_text()"),
        ("compile/a.py", "import os\nos.environ['A'] = '1'"),
        ("sharding/a.py", "from socket import create_connection"),
        ("modelzoo/config.py", "from .moe.call import ExpertCall"),
        ("compile/programs/a.py", "from ..planning.cost import CostModel"),
        ("modelzoo/cache/a.py", "from ..attention import attend"),
        ("runtime/request.py", "from .text.tokenizer import Tokenizer"),
        ("runtime/pods/a.py", "def f():\n    from .. import session"),
        ("runtime/batch/a.py", "from ..stages.run_stages import run_stages"),
    ],
)
def test_a_breach_is_found_and_named_with_its_line(path, source):
    found = violations(source, Path(path))
    assert len(found) == 1
    assert found[0].startswith(f"{path}:")


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("modelzoo/families/a.py", "from ..config import DecoderConfig\nfrom . import mapping"),
        ("compile/a.py", "from ..sharding.axis_rules import AxisRules\njax.jit(f).lower(x)"),
        (
            "runtime/a.py",
            "import os\nfrom ..compile import build\nos.environ\nprint(open('f').read())",
        ),
        ("compile/a.py", "import os\nthreads = os.cpu_count()"),
        ("modelzoo/a.py", "import jax\nname = text.lower()"),
    ],
)
def test_what_the_floors_allow_is_not_reported(path, source):
    assert violations(source, Path(path)) == []
