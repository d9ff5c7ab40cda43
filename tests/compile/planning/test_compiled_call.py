"""What is counted of a program: main memory's bytes on TPU, where its text can be had."""

from dataclasses import dataclass
from typing import cast

import jax
import pytest
from planning_models import PLAIN, work_of

from noria.compile.planning.compiled_call import Counted, compiled_call
from noria.compile.planning.cost import CostModel
from noria.compile.planning.hardware import Hardware
from noria.compile.planning.work import ONE_DEVICE
from noria.sharding.call import Call

HARDWARE = Hardware("mine", "made up", {"float32": 1e12}, 1e9, 1e8, 1e7, [])
TEXT = """HloModule jit_f

ENTRY %main (p: f32[256]) -> f32[256] {
  %p = f32[256]{0:T(256)} parameter(0)
  %c = f32[256]{0:T(256)S(1)} negate(%p)
  ROOT %y = f32[256]{0:T(256)S(1)} add(%c, %c)
}
"""


@dataclass
class Executable:
    """What is asked of a `jax.stages.Compiled`."""

    text: str | None

    def cost_analysis(self) -> dict[str, float]:
        return {"flops": 512.0, "bytes accessed": 5120.0}

    def as_text(self) -> str:
        if self.text is None:
            raise RuntimeError("UNIMPLEMENTED: asynchronous slices")
        return self.text


@pytest.mark.parametrize(
    ("platform", "text", "num_bytes"),
    [("tpu", TEXT, 1024), ("tpu", None, 0), ("cpu", TEXT, 5120), ("gpu", None, 5120)],
)
def test_on_tpu_main_memory_alone_counts_and_elsewhere_what_the_compiler_says(
    platform, text, num_bytes
):
    executable = cast(jax.stages.Compiled, Executable(text))
    counted = Counted.of(executable, platform, ONE_DEVICE.mesh, 0)
    assert (counted.flops, counted.num_bytes) == (512, num_bytes)


def test_bytes_of_shapes_stand_where_none_are_told_and_more_make_a_call_longer():
    call, cost = Call.of_step(4, 64), CostModel(work_of(PLAIN), HARDWARE)
    shapes = sum(part.bytes for part in cost.work.parts(call))
    untold = compiled_call("decode", call, Counted(0.0, 0.0, {}, 0), cost)
    assert (untold.num_bytes, untold.factor) == (shapes, 1)
    double = compiled_call("decode", call, Counted(0.0, 2 * shapes, {}, 0), cost)
    assert (double.num_bytes, double.factor) == (2 * shapes, 2)
