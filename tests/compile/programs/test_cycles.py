"""Cycles: the compiler's estimates if it has them, and otherwise prices counted by hand."""

import pytest
from hlo_snippets import CHIP, NARROW_BYTES, WIDE, WIDE_BYTES, loop, program

from noria.compile.hardware.hardware import Hardware
from noria.compile.hardware.interconnect import Interconnect
from noria.compile.programs.cycles import Prices
from noria.compile.programs.hbm_bytes import Traffic
from noria.compile.programs.hlo_text import read_program
from noria.compile.programs.report import Cycles, read_report

RATE, LINK, PEAK, CLOCK = 1e9, 1e7, 1e12, 2e9
HARDWARE = Hardware("mine", "made up", {"bfloat16": PEAK}, 1e9, RATE, LINK, [], clock=CLOCK)
MESH = {"tensor": 2}
NONE = 2**63 - 1


def cycles(*lines: str, called: str = "") -> Cycles:
    """Return the cycles of a step of a program for two devices."""
    text = program(*lines, called=called).replace(
        "HloModule jit_graph", "HloModule jit_graph, num_partitions=2"
    )
    report = read_report(text, "tpu", MESH, HARDWARE)
    assert report.step.cycles is not None
    return report.step.cycles


def estimated(number: int) -> str:
    return f', backend_config={{"window_config":{{"estimated_cycles":"{number}"}}}}'


def test_estimates_are_summed_over_turns_of_loops():
    called, run = loop("eight", 8, f"%y = {CHIP} negate(%x){estimated(50)}", state=CHIP, init="a")
    found = cycles(
        f"%a = {CHIP} negate(%w){estimated(100)}", run, "ROOT %r = () tuple()", called=called
    )
    assert (found.cycles, found.priced_share) == (500, 0)


@pytest.mark.parametrize("attributes", ["", estimated(NONE)], ids=["none", "unknown"])
def test_an_instruction_without_an_estimate_is_priced_by_its_bytes(attributes):
    found = cycles(f"ROOT %a = {WIDE} negate(%w){attributes}")
    assert found.cycles == pytest.approx(2 * WIDE_BYTES / RATE * CLOCK)
    assert found.priced_share == 1


def test_a_product_without_an_estimate_is_priced_by_its_operations_if_they_take_longer():
    factor = "f32[4096,4096]{1,0:T(8,128)S(1)}"
    found = cycles(
        f"%f = {factor} iota(), iota_dimension=0{estimated(0)}",
        f"ROOT %d = {factor} dot(%f, %f), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}",
    )
    assert found.cycles == pytest.approx(2 * 4096**3 / PEAK * CLOCK)


@pytest.mark.parametrize(
    ("x", "w", "out", "how", "flops"),
    [
        ("128,4096", "1792,4096", "128,1792", "dim_labels=bf_oi->bf", 2 * 128 * 4096 * 1792),
        (
            "2,128,64", "2,64,32", "2,128,32",
            "window={size=2 lhs_dilate=2}, dim_labels=0bf_0io->0bf", 2 * 2 * 128 * 64 * 32,
        ),
        (
            "128,64,1", "64,6,32", "128,6,32",
            "window={size=6 pad=5_5 rhs_reversal=1}, dim_labels=bf0_i0o->b0f",
            2 * 128 * 64 * 6 * 32,
        ),
    ],
    ids=["plain", "many-at-once", "two-features"],
)  # fmt: skip
def test_a_convolution_is_the_product_that_it_stands_for(x, w, out, how, flops):
    on_chip = "{0:T(8)S(1)}"
    found = cycles(
        f"%x = f32[{x}]{on_chip} iota(), iota_dimension=0{estimated(0)}",
        f"%y = f32[{w}]{on_chip} iota(), iota_dimension=0{estimated(0)}",
        f"ROOT %d = f32[{out}]{on_chip} convolution(%x, %y), {how}",
    )
    assert found.cycles == pytest.approx(flops / PEAK * CLOCK)


def test_a_kernel_is_priced_by_what_it_declares():
    # the numbers are strings
    cost = '{"flops":"5000000","transcendentals":"3","bytes_accessed":"9000"}'
    config = f'backend_config={{"custom_call_config": {{"body": "x", "cost_estimate": {cost}}}}}'
    found = cycles(
        f'ROOT %a = {WIDE} custom-call(%w), custom_call_target="tpu_custom_call", {config}'
    )
    assert found.cycles == pytest.approx(9000 / RATE * CLOCK)


def test_a_collective_is_priced_by_its_link():
    found = cycles(f"ROOT %a = {WIDE} all-reduce(%w), replica_groups={{{{0,1}}}}, to_apply=%add")
    assert found.cycles == pytest.approx(WIDE_BYTES / LINK * CLOCK)
    assert found.priced_share == 1


def test_what_is_in_flight_takes_no_cycles_but_its_bytes_bound_the_seconds():
    found = cycles(
        f"%s = ({CHIP}, {WIDE}, u32[]) copy-start(%w){estimated(7)}",
        f"%a = {CHIP} negate(%k){estimated(10)}",
        f"ROOT %d = {CHIP} copy-done(%s){estimated(7)}",
    )
    assert found.cycles == 10
    assert found.seconds == (WIDE_BYTES + NARROW_BYTES) / RATE


def test_cycles_bound_the_seconds_where_they_take_longer():
    assert cycles(f"ROOT %a = {WIDE} negate(%w){estimated(10**6)}").seconds == 10**6 / CLOCK


def test_hardware_without_a_clock_has_no_cycles():
    text = program(f"ROOT %a = {WIDE} negate(%w)")
    without = Hardware("mine", "made up", {"bfloat16": PEAK}, 1e9, RATE, LINK, [])
    assert read_report(text, "tpu", {"data": 1}, without).step.cycles is None
    parsed, interconnect = read_program(text), Interconnect(without, {"data": 1}, ())
    with pytest.raises(ValueError, match=r"mine: expected a clock.*Add clock"):
        Prices(parsed, Traffic(parsed), [], without, interconnect)
