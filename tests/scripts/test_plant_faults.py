"""Planted faults: which changes there are, how they are drawn, and which test sees one."""

import ast
import json
import subprocess
from dataclasses import asdict, replace

import pytest
from numerics_helpers import script

SMALL = script("scripts/small_faults.py")  # which the other one imports
FAULTS = script("scripts/plant_faults.py")
LIMIT = "def is_long(n):\n    return n > 3\n"


def kinds_of(text: str) -> list[tuple[str, str]]:
    text += "\n"
    source = SMALL.Source(text)
    edits = [
        edit for node in SMALL.computing(ast.parse(text)) for edit in SMALL.edits(node, source)
    ]
    return [(kind, source.fault("", kind, *edit).after) for kind, *edit in edits]


@pytest.mark.parametrize(
    ("before", "kind", "after"),
    [
        ("é = a <= b", "comparison", "é = a < b"),
        ("x = a not  in (b)", "comparison", "x = a in (b)"),
        ("x = a and (b)", "and / or", "x = a or (b)"),
        ("x = (a) - b", "+ / -", "x = (a) + b"),
        ("x = 7", "constant", "x = 8"),
        ("x = 0.5", "constant", "x = 2.0"),
        ("x = True", "constant", "x = False"),
        ("x.clear()", "call skipped", "pass"),
        ("x = f(a, b=c, *d)", None, None),
        ("x = f(a, b)", "arguments swapped", "x = f(b, a)"),
        ("x = max(a, b)", None, None),
        ('"""A text of 3 - 2."""', None, None),
        ('x: Literal[3] = f"{3 - 2}"', None, None),
        ("def f(x: Literal[3]) -> Literal[3]: ...", None, None),
        ("assert a < b", None, None),
        ("x = zip(a, strict=True)", None, None),
    ],
)
def test_code_that_computes_has_faults(before, kind, after):
    assert kinds_of(before) == ([] if kind is None else [(kind, after)])


def test_faults_are_a_function_of_seed_and_source():
    sources = {f"runtime/{name}.py": LIMIT * 20 for name in "ab"}
    drawn = SMALL.draw(sources, 4, seed=1)
    assert drawn == SMALL.draw(dict(sources), 4, seed=1) != SMALL.draw(sources, 4, seed=2)
    assert [fault.path for fault in drawn] == ["runtime/a.py"] * 2 + ["runtime/b.py"] * 2


def test_a_fault_of_several_lines_goes_where_its_lines_are_now():
    (fault,) = SMALL.draw({"a.py": "x = (\n    f(a)\n    + b\n)\n"}, 1, seed=1)
    assert (fault.line, fault.before, fault.after) == (2, "    f(a)\n    + b", "    f(a)\n    - b")
    assert FAULTS.plant(fault, "import b\n\nx = (\n    f(a)\n    + b\n)\n").endswith("- b\n)\n")
    with pytest.raises(SystemExit, match="draw again"):
        FAULTS.plant(fault, "x = f(a) + b\n")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository of one function with a test, and the fault that turns its comparison."""
    files = {
        "runtime/__init__.py": "",
        "runtime/limits.py": LIMIT,
        "tests/test_limits.py": "from noria.runtime.limits import is_long\n\n\n"
        "def test_far():\n    assert is_long(9)\n\n\ndef test_edge():\n    assert not is_long(3)\n",
        "tests/test_broken.py": "def test_broken():\n    assert False\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, "utf-8")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    monkeypatch.setattr(FAULTS, "ROOT", tmp_path)
    before, after = "    return n > 3", "    return n >= 3"
    return SMALL.Fault("runtime/limits.py", 2, "comparison", before, after)


def test_the_first_test_that_fails_sees_the_fault(repository):
    seen = FAULTS.seen(repository, ["tests/test_limits.py"], is_added=True)
    assert seen == replace(
        repository,
        test="tests/test_limits.py::test_edge",
        message="assert not True",
        is_added=True,
    )


def test_a_page_counts_the_faults_that_were_seen_before_and_since():
    fault = SMALL.Fault("a.py", 1, "comparison", "x = a | b < 3", "x = a | b <= 3")
    seen = replace(fault, test="tests/test_a.py::test_b")
    faults = [fault, seen, seen, replace(seen, is_added=True), replace(fault, reason="None is 3.")]
    record = {"seed": 1, "commit": "0" * 40, "faults": [asdict(one) for one in faults]}
    page = FAULTS.markdown(record)
    assert "saw 2 of them before" in page and "see 1 more. 1 change nothing" in page
    lines = r"`a.py`:1 | comparison:<br>`x = a \| b < 3`<br>`x = a \| b <= 3`"
    ends = (
        "unseen",
        "`tests/test_a.py::test_b`",
        "`tests/test_a.py::test_b` (added)",
        "None is 3.",
    )
    assert all(f"{lines} | {end} |" in page for end in ends)


def test_a_record_begins_with_faults_that_no_test_has_seen(run, tmp_path):
    record = tmp_path / "faults.json"
    run("plant_faults.py", "--record", record, "draw", "--seed", 3, "--number", 2)
    table = json.loads(record.read_text("utf-8"))
    assert table["seed"] == 3 and len(table["faults"]) == 2
    assert "saw 0 of them before" in record.with_suffix(".md").read_text("utf-8")
    listed = run("plant_faults.py", "--record", record, "list")
    assert all(fault["path"] in listed for fault in table["faults"])
