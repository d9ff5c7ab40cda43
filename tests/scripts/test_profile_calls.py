"""Profiles of calls: the kind of work of an instruction, and the time that is its own."""

import sys

import pytest
from numerics_helpers import ROOT, script

GROUPS = script("scripts/call_groups.py")


@pytest.mark.parametrize(
    ("source", "file", "opcodes", "is_of_weights", "group"),
    [
        ("jit(graph)/layers.3/BTF,FD->BTD/dot_general", "operations.py", ["dot"], False, "down"),
        ("jit(graph)/...D,VD->...V/dot_general", "operations.py", ["dot"], False, "logits"),
        ("jit(graph)/layers.3/dot_general", "attend.py", ["dot"], False, GROUPS.SCORES),
        ("jit(graph)/layers.3/dot_general", "attend.py", ["dot"], True, GROUPS.VALUES),
        ("jit(graph)/layers.3/reduce_max", "attend.py", ["reduce"], False, GROUPS.SOFTMAX),
        ("jit(graph)/layers.3/scatter", "pages.py", ["scatter"], False, GROUPS.WRITES),
        ("jit(graph)/convert_element_type", "rope.py", ["convert"], False, GROUPS.MOVED),
        ("jit(graph)/layers.3/rsqrt", "layers.py", ["add", "rsqrt"], False, "norms"),
        ("jit(graph)/mul", "layers.py", ["logistic", "multiply"], False, "gated unit"),
        ("jit(graph)/layers.3/add", "block.py", ["add"], False, GROUPS.REST),
    ],
)
def test_an_instruction_is_grouped_by_its_name_and_by_what_is_in_it(
    source, file, opcodes, is_of_weights, group
):
    assert GROUPS.group_of(source, file, opcodes, is_of_weights) == group


def test_the_files_of_groups_are_in_the_library():
    folders = ("modelzoo", "compile")
    names = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert {*GROUPS.FILES, "layers.py"} <= names


def test_an_event_counts_without_those_within_it(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "scripts"), *sys.path])
    times = script("scripts/call_times.py")
    events = [(0, 10e6, "a"), (1e6, 4e6, "b"), (2e6, 1e6, "a"), (20e6, 5e6, "b")]
    assert times.own_times(events) == {"a": 7, "b": 8}
