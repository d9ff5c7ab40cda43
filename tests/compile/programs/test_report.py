"""Figures read from programs: small programs counted by hand, one number at a time."""

from pathlib import Path

import pytest
from hlo_snippets import CHIP, NARROW, NARROW_BYTES, WIDE, WIDE_BYTES, computation, loop, program

import noria.compile.programs
from noria.compile.programs.report import ProgramReport, read_report

MESH = {"data": 1}
ROOT = str(Path(noria.compile.programs.__file__).parents[2])
AT_45 = ', metadata={op_name="jit(graph)/layers.3/dot_general" stack_frame_id=2}'


def read(*lines: str, called: str = "", platform: str = "tpu") -> ProgramReport:
    """Read the report of a program; arrays of 2048 bytes count as large."""
    return read_report(
        program(*lines, called=called, root=ROOT), platform, MESH, min_bytes=NARROW_BYTES
    )


def fused(*lines: str, parameter: str) -> str:
    return computation("%fused", f"%p = {parameter} parameter(0)", *lines)


def test_a_line_of_source_is_the_innermost_that_is_ours():
    found = read(
        f"%a = {WIDE} negate(%w), metadata={{stack_frame_id=3}}",
        f"ROOT %b = {WIDE} negate(%a), metadata={{stack_frame_id=4}}",
    )
    assert {one.line for one in found.moved} == {
        "modelzoo/attention/attend.py:45",
        "compile/graphs/steps.py:120",
    }


def test_a_line_of_others_alone_is_named_without_its_folder():
    text = program(f"ROOT %a = {WIDE} negate(%w), metadata={{stack_frame_id=3}}", root="/gone")
    assert [one.line for one in read_report(text, "tpu", MESH).moved] == ["module.py:7"]


def test_a_fusion_without_a_line_has_that_of_what_it_fuses():
    fused = computation(
        "%fused", f"%x = {WIDE} parameter(0)", f"ROOT %y = {WIDE} negate(%x){AT_45}"
    )
    found = read(f"ROOT %f = {WIDE} fusion(%w), kind=kLoop, calls=%fused", called=fused)
    assert [one.line for one in found.moved] == ["modelzoo/attention/attend.py:45"]


def test_the_first_reading_of_an_argument_is_no_excess():
    found = read(
        f"%a = {CHIP} negate(%w){AT_45}",
        f"%b = {CHIP} add(%w, %a), metadata={{stack_frame_id=1}}",
        f"ROOT %c = {WIDE} copy(%b), metadata={{stack_frame_id=1}}",
    )
    excess = {one.line: (one.num_bytes, one.excess) for one in found.moved}
    assert excess == {
        "modelzoo/attention/attend.py:45": (WIDE_BYTES, 0),
        "compile/graphs/steps.py:120": (2 * WIDE_BYTES, 2 * WIDE_BYTES),
    }
    assert found.step.bytes_moved == 3 * WIDE_BYTES


def test_what_has_no_line_is_told_by_the_argument_that_it_moves():
    found = read(f"%a = {CHIP} copy(%w)", f"ROOT %b = {CHIP} negate(%a){AT_45}")
    (copy,) = found.moved
    assert (copy.line, copy.operation) == ("", "copy of parameters['layers.*.up']")


def test_an_inner_loop_counts_its_turns_and_the_loop_over_steps_counts_one():
    inner, run_inner = loop("inner", 8, f"%y = {WIDE} negate(%x)", init="x", source="a/scatter")
    turns, run = loop(
        "steps",
        None,
        "%n = s32[] constant(3)",
        run_inner,
        f"%y = {WIDE} get-tuple-element(%inner), index=1",
        source="jit(graph)/while",
    )
    found = read(
        f"%once = {CHIP} negate(%w)",
        run,
        f"ROOT %r = {WIDE} get-tuple-element(%steps), index=1",
        called=inner + turns,
    )
    (one,) = found.loops
    assert (one.line, one.operation) == ("modelzoo/attention/attend.py:45", "a/scatter")
    assert (one.turns, one.runs, one.bytes_a_turn, one.is_once) == (8, 1, 2 * WIDE_BYTES, False)
    assert (found.step.loop_turns, found.once.loop_turns) == (8, 0)
    assert found.smallest_turn == 2 * WIDE_BYTES
    assert found.step.bytes_moved == 8 * 2 * WIDE_BYTES
    assert found.once.bytes_moved == WIDE_BYTES


@pytest.mark.parametrize(
    ("turns", "source"), [(4, "jit(graph)/while"), (None, "jit(graph)/a/while")]
)
def test_a_loop_that_is_not_the_graphs_own_or_whose_turns_are_known_is_not_over_steps(
    turns, source
):
    called, run = loop("some", turns, f"%y = {WIDE} negate(%x)", source=source)
    found = read(run, f"ROOT %r = {WIDE} get-tuple-element(%some), index=1", called=called)
    assert (found.step.loop_turns, found.once.bytes_moved) == (turns or 1, 0)
    assert [one.turns for one in found.loops] == [turns]


def test_of_branches_the_one_that_moves_least_counts_with_its_loops():
    called, run = loop("many", 9, f"%y = {WIDE} negate(%x)", init="q")
    parameter = f"%q = {WIDE} parameter(0)"
    cheap = computation("%cheap", parameter, f"ROOT %r = {CHIP} negate(%q)")
    dear = computation(
        "%dear", parameter, "%n = s32[] constant(9)", run,
        f"ROOT %r = {WIDE} get-tuple-element(%many), index=1",
    )  # fmt: skip
    branches = "branch_computations={%cheap, %dear}"
    found = read(
        f"ROOT %c = {CHIP} conditional(%n, %w, %w), {branches}", called=called + cheap + dear
    )
    assert (found.step.loop_turns, found.step.bytes_moved) == (0, WIDE_BYTES)


def rewrites(found: ProgramReport) -> list[tuple[str, str, int, bool]]:
    return [(one.argument, one.array, one.num_bytes, one.is_converted) for one in found.rewrites]


KEYS, WEIGHTS = "arguments[0].cache[3].k_BS[0]", "parameters['layers.3.up']"


def test_an_argument_in_another_dtype_is_converted_also_by_a_fusion_that_does_nothing_else():
    assert rewrites(read(f"ROOT %a = {WIDE} convert(%k)")) == [
        (KEYS, "f32[8,128]", WIDE_BYTES, True)
    ]
    called = fused(f"%v = {NARROW} bitcast(%p)", f"ROOT %c = {WIDE} convert(%v)", parameter=NARROW)
    found = read(f"ROOT %a = {WIDE} fusion(%k), kind=kLoop, calls=%fused", called=called)
    assert rewrites(found) == [(KEYS, "f32[8,128]", WIDE_BYTES, True)]
    assert (found.step.converted_bytes, found.step.copied_bytes) == (WIDE_BYTES, 0)


def test_a_product_that_converts_what_it_reads_and_a_small_array_are_not_converted_arguments():
    called = fused(
        f"%c = {WIDE} convert(%p)",
        f"ROOT %d = {WIDE} multiply(%c, %c)",
        parameter=NARROW,
    )
    found = read(
        f"%a = {WIDE} fusion(%k), kind=kLoop, calls=%fused",
        "%s = bf16[4,128]{1,0} slice(%k), slice={[0:4], [0:128]}",
        "%t = f32[1,128]{1,0} slice(%w), slice={[0:1], [0:128]}",
        "%u = bf16[1,128]{1,0} convert(%t)",
        f"ROOT %b = {NARROW} convert(%a)",
        called=called,
    )
    assert found.rewrites == ()


def test_a_cache_that_is_converted_written_to_and_converted_back_in_each_step_counts_twice_a_step():
    row = "f32[1,128]{1,0}"
    called, run = loop(
        "steps",
        None,
        f"%c = {WIDE} convert(%x)",
        f"%r = {row} slice(%c), slice={{[0:1], [0:128]}}",
        f"%u = {WIDE} dynamic-update-slice(%c, %r, %i, %i)",
        f"%y = {NARROW} convert(%u)",
        state=NARROW,
        init="k",
        source="jit(graph)/while",
    )
    found = read(run, f"ROOT %r = {NARROW} get-tuple-element(%steps), index=1", called=called)
    assert rewrites(found) == [
        (KEYS, "f32[8,128]", WIDE_BYTES, True),
        (KEYS, "bf16[8,128]", NARROW_BYTES, True),
    ]
    assert found.step.converted_bytes == WIDE_BYTES + NARROW_BYTES
    assert found.once.converted_bytes == 0


def test_a_weight_converted_before_the_loop_counts_once_a_call():
    called, run = loop("steps", None, f"%y = {NARROW} negate(%x)", state=NARROW, init="c",
                       source="jit(graph)/while")  # fmt: skip
    lines = (
        f"%c = {NARROW} convert(%w)",
        run,
        f"ROOT %r = {NARROW} get-tuple-element(%steps), index=1",
    )
    found = read(*lines, called=called)
    assert rewrites(found) == [(WEIGHTS, "bf16[8,128]", NARROW_BYTES, True)]
    assert (found.step.converted_bytes, found.once.converted_bytes) == (0, NARROW_BYTES)


@pytest.mark.parametrize(
    ("lines", "copied"),
    [
        ((f"ROOT %a = {NARROW} copy(%k)",), NARROW_BYTES),
        ((f"%v = {NARROW} bitcast(%k)", f"ROOT %a = {NARROW} copy(%v)"), NARROW_BYTES),
        (
            (
                f"%s = ({NARROW}, {NARROW}, u32[]) copy-start(%k)",
                f"ROOT %a = {NARROW} copy-done(%s)",
            ),
            NARROW_BYTES,
        ),
        (("ROOT %a = f32[4,128]{1,0} slice(%w), slice={[0:4], [0:128]}",), WIDE_BYTES // 2),
        ((f"ROOT %a = {CHIP} copy(%w)",), 0),
        ((f"%b = {NARROW} negate(%k)", f"ROOT %a = {NARROW} copy(%b)"), 0),
    ],
    ids=["whole", "view", "asynchronous", "slice", "onto-the-chip", "not-an-argument"],
)
def test_an_argument_is_copied_from_main_memory_to_main_memory(lines, copied):
    found = read(*lines)
    assert (found.step.copied_bytes, found.step.converted_bytes) == (copied, 0)
    assert len(found.rewrites) == bool(copied)


LIBRARY = ', backend_config={"fusion_config":{"kind":"__ynn_fusion"}}'
DOT = "f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={1}"


def test_on_the_cpu_a_product_that_no_library_runs_is_slow():
    called = fused(f"ROOT %d = {DOT}", parameter=WIDE)
    alone, fusion = DOT.replace("%p", "%w"), "f32[8,8]{1,0} fusion(%w), kind=kCustom, calls=%fused"
    flops = 2 * 8 * 8 * 128
    for line, expected in ((alone, flops), (fusion, flops), (fusion + LIBRARY, 0)):
        found = read(f"ROOT %a = {line}", called=called, platform="cpu")
        assert (found.step.slow_flops, len(found.slow_products)) == (expected, bool(expected))
        assert read(f"ROOT %a = {line}", called=called).step.slow_flops == 0
