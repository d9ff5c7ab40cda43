"""Counts of a program: main memory's bytes on TPU, if the program's text is available."""

from typing import cast

import jax
import pytest
from decode_steps import step_of
from hlo_snippets import NARROW_BYTES, WIDE, WIDE_BYTES, loop, program
from planning_models import PLAIN, work_of

from noria.compile.graphs.graph_kinds import GraphKey
from noria.compile.hardware.hardware import Hardware
from noria.compile.planning.compiled_call import ProgramCounts, compiled_call
from noria.compile.planning.cost import CostModel

HARDWARE = Hardware("mine", "made up", {"float32": 1e12}, 1e9, 1e8, 1e7, [])
COST = CostModel(work_of(PLAIN), HARDWARE)
TEXT = """HloModule jit_f

ENTRY %main (p: f32[256]) -> f32[256] {
  %p = f32[256]{0:T(256)} parameter(0)
  %c = f32[256]{0:T(256)S(1)} negate(%p)
  ROOT %y = f32[256]{0:T(256)S(1)} add(%c, %c)
}
"""


class Executable:
    """The part of `jax.stages.Compiled` that the counts use."""

    def cost_analysis(self) -> dict[str, float]:
        return {"flops": 512.0, "bytes accessed": 5120.0}


EXECUTABLE = cast(jax.stages.Compiled, Executable())


@pytest.mark.parametrize(
    ("platform", "text", "num_bytes"),
    [("tpu", TEXT, 1024), ("tpu", None, 0), ("cpu", TEXT, 1024), ("gpu", None, 5120)],
)
def test_main_memory_alone_counts_and_without_a_text_what_the_compiler_says_off_the_tpu(
    platform, text, num_bytes
):
    counted = ProgramCounts.from_executable(EXECUTABLE, text, platform, COST)
    assert (counted.flops, counted.num_bytes, counted.sent) == (512, num_bytes, {})


def test_what_runs_once_a_call_counts_with_its_share_of_a_step():
    once = f"%b = {WIDE} convert(%k)"
    called, run = loop("steps", None, f"%y = {WIDE} negate(%x)", source="jit(graph)/while")
    last = f"ROOT %r = {WIDE} get-tuple-element(%steps), index=1"
    text = program(once, run, last, called=called)
    counted = ProgramCounts.from_executable(EXECUTABLE, text, "cpu", COST, steps=4)
    assert counted.num_bytes == 2 * WIDE_BYTES + (NARROW_BYTES + WIDE_BYTES) / 4


def test_cycles_count_where_they_take_longer_and_none_take_less_than_shapes():
    call = step_of(4, 64)
    untold = compiled_call(GraphKey("decode"), call, ProgramCounts(0.0, 0.0, {}, 0), COST)
    for seconds, factor in ((0.5 * untold.seconds, 1), (3 * untold.seconds, 3)):
        found = compiled_call(
            GraphKey("decode"), call, ProgramCounts(0.0, 0.0, {}, 0, seconds=seconds), COST
        )
        assert found.factor == pytest.approx(factor)


def test_a_program_that_takes_much_longer_than_predicted_says_why():
    call = step_of(4, 64)
    needed = COST.work.needed(call).total
    near = compiled_call(GraphKey("decode"), call, ProgramCounts(0.0, 1.1 * needed, {}, 0), COST)
    far = compiled_call(
        GraphKey("decode"), call, ProgramCounts(0.0, 5e9, {}, 0, 4352, 2e9, 1e9), COST
    )
    assert (near.difference, far.needed_bytes) == ("", needed)
    assert far.difference == (
        f"decode takes {far.factor:.1f} times the time predicted from its shapes: it moves "
        "5.00 GB where 0.00 GB are needed, converts 2.00 GB of arguments, copies 1.00 GB of them, "
        "and runs 4,352 loop iterations"
    )


def test_turns_of_layers_add_up_in_every_figure():
    shorter = ProgramCounts(1, 2, {}, 3, 4, 5, 6, 7, 8)
    longer = ProgramCounts(2, 4, {}, 6, 8, 10, 12, 14, 16)
    assert longer.with_more_turns(2, shorter) == ProgramCounts(4, 8, {}, 12, 16, 20, 24, 28, 32)


def test_bytes_of_shapes_stand_where_none_are_told_and_more_make_a_call_longer():
    call, cost = step_of(4, 64), CostModel(work_of(PLAIN), HARDWARE)
    shapes = sum(part.bytes for part in cost.work.parts(call))
    untold = compiled_call(GraphKey("decode"), call, ProgramCounts(0.0, 0.0, {}, 0), cost)
    assert (untold.num_bytes, untold.factor) == (shapes, 1)
    double = compiled_call(GraphKey("decode"), call, ProgramCounts(0.0, 2 * shapes, {}, 0), cost)
    assert (double.num_bytes, double.factor) == (2 * shapes, 2)
