"""Small faults that a line of Python can have, and draws of them.

A fault is a comparison turned, `and` for `or`, `+` for `-`, a number or truth value changed, a call
skipped, or two arguments swapped. Only code that computes is changed: no annotations, no texts, and
no checks of other code (`assert`, `strict=`, `frozen=`). Imported by `plant_faults.py`.
"""

import ast
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

CHECKS = ("strict", "frozen")
"""Keywords that only refuse code which is wrong elsewhere."""
SYMMETRIC = ("max", "maximum", "min", "minimum")
OPPOSITE = {"<": "<=", ">": ">=", "==": "!=", "is": "is not", "in": "not in", "and": "or", "+": "-"}
TURNED = OPPOSITE | {turned: operator for operator, turned in OPPOSITE.items()}
OPERATOR = re.compile(r"is\s+not\b|not\s+in\b|\b(?:is|in|and|or)\b|[<>=!]=|[<>+-]")


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
    """Draw faults, as a function of the seed and the texts of files alone.

    The lines that can have a fault, in the order of the files, are divided into equal runs, and one
    line of each is drawn.
    """
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
