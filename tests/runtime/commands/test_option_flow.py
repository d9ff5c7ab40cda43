"""The options of `noria batch` go through few places: their value is followed by syntax trees.

The script begins with the parameter of `run` of the command, which gets the value that the parser
returns. A dataclass counts as made of the value if at least `MADE` arguments of its constructor
read the value; its objects are followed too. Function by function, it follows a value into the
parameters of the calls that get it under whatever name, into local names, results and copies by
`replace`, into fields of other objects, and out of these fields in the methods of their class. It
sees no values in containers, and no methods of other objects, unless one class alone has the name.

A place is a function that reads fields of such an object, or a function and a call in it that gets
such an object. Several reads in one function are one place, as are several calls of one name.
"""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
START = ("runtime/commands/batch_command.py", "run", "options")
MADE, NEVER = 5, 10**6
MAX_PLACES = {NEVER: 16, MADE: 35}
"""Upper bounds for the places of the value alone, and of the value with the dataclasses made of it.
They only shrink; 40 in all are wanted."""


class Flow:
    """The places that a value reaches in the files of a folder."""

    def __init__(self, root: Path, folder: str, start: tuple[str, str, str], made: int = MADE):
        self.functions, self.classes, self.imports, self.made = {}, {}, {}, made
        for path in sorted((root / folder).rglob("*.py")):
            self._read(path.relative_to(root), ast.parse(path.read_text("utf-8")))
        self.parameters, self.fields, self.results, self.places = {start}, set(), set(), set()
        size = -1
        while size != (size := sum(map(len, (self.parameters, self.fields, self.results)))):
            for key in self.functions:
                self._follow(key)

    def _read(self, path: Path, tree: ast.Module) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.level:
                module = path.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                for alias in node.names:
                    self.imports[f"{path}", alias.asname or alias.name] = f"{module}.py", alias.name
            owner = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
            for part in ast.iter_child_nodes(node):
                if isinstance(part, ast.FunctionDef):
                    self.functions[f"{path}", owner + part.name] = part
                elif isinstance(part, ast.ClassDef):
                    fields = [x.target.id for x in part.body if isinstance(x, ast.AnnAssign)]
                    self.classes[f"{path}", part.name] = fields

    def _target(self, key: tuple[str, str], called: ast.AST) -> tuple[str, str] | None:
        """Return the function or class that a call in a function names."""
        if isinstance(called, ast.Name):
            return self.imports.get((key[0], called.id), (key[0], called.id))
        if not isinstance(called, ast.Attribute):
            return None
        if isinstance(called.value, ast.Name) and called.value.id == "self":
            return key[0], f"{key[1].partition('.')[0]}.{called.attr}"
        named = [other for other in self.functions if other[1].endswith(f".{called.attr}")]
        return named[0] if len(named) == 1 else None

    def _follow(self, key: tuple[str, str]) -> None:
        """Follow the value through one function."""
        names = {name for *where, name in self.parameters if tuple(where) == key}

        def has(node: ast.AST) -> bool:
            if isinstance(node, ast.Name):
                return node.id in names
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                field = key[0], key[1].partition(".")[0], node.attr
                return node.value.id == "self" and field in self.fields
            if not isinstance(node, ast.Call):
                return False
            if ast.unparse(node.func) == "replace":
                return has(node.args[0])
            if (target := self._target(key, node.func)) not in self.classes:
                return (target, None) in self.results
            given = [*node.args, *(keyword.value for keyword in node.keywords)]
            return sum(any(map(reads, ast.walk(x))) for x in given) >= self.made

        def reads(node: ast.AST) -> bool:
            return isinstance(node, ast.Attribute) and has(node.value)

        for node in ast.walk(self.functions[key]):
            if isinstance(node, ast.Assign):
                result, goal = self._target(key, getattr(node.value, "func", node)), node.targets[0]
                parts = enumerate(goal.elts) if isinstance(goal, ast.Tuple) else [(None, goal)]
                for i, x in parts:
                    if (has(node.value) and i is None) or (result, i) in self.results:
                        names |= {x.id} if isinstance(x, ast.Name) else set()
            elif isinstance(node, ast.Return) and node.value is not None:
                many = isinstance(node.value, ast.Tuple)
                parts = enumerate(node.value.elts) if many else [(None, node.value)]
                self.results |= {(key, i) for i, x in parts if has(x)}
            elif reads(node):
                self.places.add((*key, "reads"))
            elif isinstance(node, ast.Call):
                given = [*enumerate(node.args), *((x.arg, x.value) for x in node.keywords)]
                for place in (place for place, x in given if has(x)):
                    self.places.add((*key, f"calls {ast.unparse(node.func)}"))
                    self._enter(self._target(key, node.func), place)

    def _enter(self, target: tuple[str, str] | None, place: int | str | None) -> None:
        """Note that a function or the constructor of a class gets the value."""
        if (fields := self.classes.get(target)) is not None:
            self.fields |= {(*target, fields[place] if isinstance(place, int) else place)}
        elif (function := self.functions.get(target)) is not None:
            names = [x.arg for x in (*function.args.args, *function.args.kwonlyargs)]
            names = names[names[:1] in (["self"], ["cls"]) :]
            self.parameters |= {(*target, names[place] if isinstance(place, int) else place)}


@pytest.mark.parametrize("made", MAX_PLACES)
def test_the_options_of_a_batch_go_through_few_places(made):
    places = sorted(Flow(ROOT, "runtime", START, made).places)
    assert len(places) <= MAX_PLACES[made], "\n".join([f"{len(places)} places", *map(str, places)])
