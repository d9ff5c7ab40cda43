"""Write docs/plan_file.md: every key of plan, layout and hardware files, from the dataclasses.

    python scripts/plan_reference.py            # bring docs/plan_file.md up to date

A row follows from a field: its type, its default, and its docstring, which ends in "Unit: ..." for
every number. A test compares, so a key cannot be forgotten.
"""

import ast
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache
from itertools import pairwise
from pathlib import Path

from noria.compile import compiler_options
from noria.compile.expert_plan import ExpertPlan
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefix_grid import PlannedPrefix
from noria.compile.hardware.efficiency import AT_PEAKS, Efficiency
from noria.compile.hardware.hardware import Hardware
from noria.compile.plan import SCHEMA, Numbers, Plan
from noria.compile.plan_tables import PlanTable
from noria.modelzoo import axes
from noria.modelzoo.moe_config import Dispatch
from noria.sharding.layout import Layout
from noria.sharding.legality import RULE_AXES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "plan_file.md"
HEAD = "| key | type | unit | default | meaning |\n|---|---|---|---|---|\n"
NUMBERS = ("integer", "number")

INTRO = f"""\
# Plan, layout and hardware files

Written by `scripts/plan_reference.py`.

A plan is a TOML file that decides which graphs exist. `noria batch` derives one, `noria plan`
searches for one, and `--plan plan.toml` uses one. The current schema is {SCHEMA}. Unknown keys
are refused. Any key can be set on the command line: `--set buckets.decode_slots=32`. The pages
[Buckets](buckets.md), [Planning](planning.md) and [Layouts](layouts.md) explain how to choose the
values.

The column *default* says "required" for a key that a file must have, and "none" for a key that
has no value if it is left out.
"""
PREFIXES = """\
The beginnings of prompts that groups of rows read together in decode ([Prompts that begin
alike](sharing.md)). In a plan without this table, each row reads its own pages.
"""
ADAPTERS = """\
The number and the ranks of the adapters that rows may use ([Adapters](adapters.md)).
"""
EVIDENCE = """\
What the seconds of a plan were made from, and what they predict for the planned workload. `noria
plan` writes it. It changes no graph and no answer: a job continues with a plan that differs in it
alone. A plan that `--set` changes loses it.
"""
EFFICIENCY = """\
What programs reach of the peaks of a kind of device. A table of `products` or `logits` has growing
numbers of `rows` and a `share` for each: `products.bfloat16 = { rows = [64, 256], share = [0.75,
0.6] }`. Kinds of calls are `prefill`, `chunk` and `decode`.
"""
STRUCTURED = """\
The forms that answers may have ([Structured output](structured.md)), and the sizes of their tables.
A plan without this table serves no row with a form. noria compiles each form to an automaton over
tokens, and writes these sizes. A *mask* is a set of allowed tokens. A *move* leads from a state to
the next one, for a class of tokens. Moves and masks are stored in blocks. Equal blocks are
stored once.
"""
INTRODUCTIONS = {
    "evidence": EVIDENCE, "prefixes": PREFIXES, "structured": STRUCTURED, "adapters": ADAPTERS,
}  # fmt: skip
"""The texts above the keys of tables that need one."""
LAYOUT_OF_PLAN = """\
The layout is part of the plan. On one device, a plan has none of these keys. `layout` is the
name of the layout; all others are those of a [layout file](#layout-file).
"""
COMPILER = f"""\
Options of XLA's compiler. KIND is the kind of graph: {
    ", ".join(f"`{k}`" for k in compiler_options.KINDS)
}. A key is the name of an option, and its value is a string, a number,
true or false. An option that the target's compiler does not know is refused. The table has
the defaults of options that a plan does not set. The default of the CPU applies only if all
products are of float32, and the defaults of GPUs only to the named formats:
"""
MESH = """\
`[mesh]` has a size for each mesh axis, major to minor in device order. The product of the sizes
is the number of devices. The axes are `data`, `sequence`, `tensor` and `expert`. `[rules]` maps a
logical axis to a mesh axis, to a list of mesh axes, or to `""` for replicated. `[prefill.rules]`
and `[decode.rules]` have the rules that differ in one phase.
"""
HARDWARE = """\
`noria plan --hardware FILE` reads tables of your own, one for each kind of device: `[v5e]`,
`[h100]`. A table replaces the published one of the same name. `compile/hardware/hardware.toml`
has the published ones with their sources.
"""


@dataclass(frozen=True)
class Key:
    """One row of a table."""

    name: str
    type: str
    default: str
    docstring: str

    def row(self) -> str:
        meaning, unit = _split_unit(self.docstring)
        if not meaning:
            raise ValueError(f"{self.name}: expected a docstring, got none.")
        if any(word in self.type for word in NUMBERS) and not unit:
            raise ValueError(f'{self.name}: expected a docstring that ends in "Unit: ...".')
        return f"| `{self.name}` | {self.type} | {unit} | {self.default} | {meaning} |\n"


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page: a section for each table of a file."""
    return "\n".join(_sections())


def _sections() -> Iterator[str]:
    yield INTRO
    yield "## Plan file\n"
    schema = Key(
        "schema", "integer", "required", f"The version of the format: {SCHEMA}. Unit: version."
    )
    yield _table([schema, *_keys(Plan, only=("target", "max_length_reason"))])
    for table in Plan.TABLES:
        yield from _table_of_plan(table)
    yield "### `[experts.prefill]` and `[experts.decode]`\n"
    dispatch = _keys(Dispatch, only=("kind", "capacity_factor"), renamed={"kind": "dispatch"})
    yield _table(dispatch)
    yield "### Layout of a plan\n"
    yield LAYOUT_OF_PLAN
    yield "### `[compiler.KIND]`\n"
    yield COMPILER
    yield _platform_options()
    yield "## Layout file\n"
    yield _table(
        _keys(Layout, renamed={"prefill": "prefill.rules", "decode": "decode.rules"}, tables=True)
    )
    yield MESH
    yield "| logical axis | meaning |\n|---|---|\n" + "".join(_axis_rows())
    yield "## Hardware file\n"
    yield HARDWARE
    yield _table([key for key in _keys(Hardware, tables=True) if key.name != "name"])
    yield "### `[KIND.efficiency]`\n"
    yield EFFICIENCY
    yield _table(_keys(Efficiency, tables=True))


def _table_of_plan(owner: type[PlanTable]) -> Iterator[str]:
    """The section of a table, and those of the tables in it that a file has beside it."""
    yield f"### `[{owner.NAME}]`\n"
    if owner.NAME in INTRODUCTIONS:
        yield INTRODUCTIONS[owner.NAME]
    if owner is BucketGrid:
        yield _table(_bucket_keys())
        for table in BucketGrid.TABLES:
            yield from _table_of_plan(table)
    else:
        yield _table(_keys(owner, only=("overflow",) if owner is ExpertPlan else (), tables=True))


def _table(keys: Sequence[Key]) -> str:
    return HEAD + "".join(key.row() for key in keys)


def _keys(
    owner: type,
    only: Sequence[str] = (),
    renamed: Mapping[str, str] = types.MappingProxyType({}),
    tables: bool = False,
) -> list[Key]:
    """A key for each field; `tables` shows types of this library as tables of a file."""
    hints, docstrings = typing.get_type_hints(owner), _docstrings(owner)
    return [
        Key(
            renamed.get(field.name, field.name),
            _type(hints[field.name], tables),
            _default(owner, field),
            docstrings.get(field.name, ""),
        )
        for field in fields(owner)
        if not only or field.name in only
    ]


def _bucket_keys() -> list[Key]:
    """The keys of `[buckets]`: the fields, and `chunk`, which is no field but a key of a file."""
    own = {table.NAME for table in BucketGrid.TABLES}
    keys = [key for key in _keys(BucketGrid, tables=True) if key.name not in own]
    chunk = BucketGrid.__dict__["chunks"].__doc__ or ""
    position = next(index for index, key in enumerate(keys) if key.name == "prefill") + 1
    keys.insert(position, Key("chunk", "integer, or list of integers", "none", chunk))
    return keys


def _type(hint: object, tables: bool) -> str:
    """A type as TOML has it."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    simple = {int: "integer", float: "number", str: "string", bool: "true or false"}
    if hint in simple:
        return simple[hint]
    if origin is typing.Literal:
        return "string"
    if origin is types.UnionType:
        (some,) = (argument for argument in arguments if argument is not types.NoneType)
        return _type(some, tables)
    if origin in (tuple, list):
        return f"list of {_plural(arguments[0])}"
    if origin is Mapping and arguments[1] in (int, float):
        return "table of numbers"
    if tables:
        return "table"
    raise ValueError(f"expected a type that a TOML file has, got {hint}.")


def _plural(item: object) -> str:
    if item is str:
        return "strings"
    if item is PlannedPrefix:
        return "pairs of an integer and a string"
    return "integers" if item is int else "lists of integers"


def _default(owner: type, field: typing.Any) -> str:
    if field.default_factory is not MISSING and owner in (Numbers, Efficiency):
        return "none"
    if field.default is MISSING:
        optional = owner is Layout and field.name in ("name", "rules", "prefill", "decode")
        return "none" if optional else "required"
    value = field.default
    if value in (None, "", AT_PEAKS):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


@cache
def _docstrings(owner: object) -> dict[str, str]:
    """The string below each assignment of a class or module, on one line."""
    assert isinstance(owner, type | types.ModuleType)
    tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else tree.body
    found = {}
    for before, after in pairwise(body):
        target = getattr(before, "target", None) or getattr(before, "targets", [None])[0]
        is_text = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        if isinstance(target, ast.Name) and is_text:
            found[target.id] = " ".join(str(after.value.value).split())
    return found


def _split_unit(docstring: str) -> tuple[str, str]:
    """The meaning, and the unit if the docstring ends in one."""
    text = " ".join(docstring.split())
    found = re.fullmatch(r"(.*?)\s*Unit: ([^.]+)\.", text)
    return (found[1], found[2]) if found else (text, "")


def _axis_rows() -> Iterator[str]:
    """A row for each logical axis that rules may name."""
    names = {value: name for name, value in vars(axes).items() if isinstance(value, str)}
    docstrings = _docstrings(axes)
    for axis in RULE_AXES:
        if not (meaning := docstrings.get(names[axis], "")):
            raise ValueError(f"axes.{names[axis]}: expected a docstring, got none.")
        yield f"| `{axis}` | {meaning} |\n"


def _platform_options() -> str:
    rows = [
        f"| {platform} | `{kind}` | `{name}` | `{value}` |\n"
        for platform, kinds in compiler_options.PLATFORM_OPTIONS.items()
        for kind, options in kinds.items()
        for name, value in options.items()
    ]
    rows += [
        f"| gpu, {formats} | all but `fork` | `{name}` | `{json.dumps(value)}` |\n"
        for formats, options in (
            ("weights in groups", compiler_options.GPU_OPTIONS_FOR_GROUPS),
            ("cache in codes", compiler_options.GPU_OPTIONS_FOR_CODED_CACHES),
        )
        for name, value in options.items()
    ]
    return "| platform | graphs | option | default |\n|---|---|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    main()
