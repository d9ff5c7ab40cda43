"""Bytes of main memory: small programs counted by hand, and real programs against XLA's count."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from program_bytes import hbm_bytes

HBM, CHIP = "f32[8,128]{1,0:T(8,128)}", "f32[8,128]{1,0:T(8,128)S(1)}"
WHOLE = 8 * 128 * 4
ROW = "f32[1,128]{1,0:T(1,128)}"
OF_ROW = 128 * 4
INDEX = "s32[]{:T(128)S(6)}"
PARAMETERS = (f"%p = {HBM} parameter(0)", f"%c = {CHIP} parameter(1)", f"%i = {INDEX} parameter(2)")


def computation(name: str, *lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"{name} (x: f32[8,128]) -> f32[8,128] {{\n{body}\n}}\n"


def moved(*lines: str, called: str = "") -> int:
    """Return the bytes of a program with %p in main memory, %c on the chip and an index %i."""
    return hbm_bytes(
        f"HloModule jit_f\n\n{called}\n{computation('ENTRY %main', *PARAMETERS, *lines)}"
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"ROOT %y = {HBM} add(%p, %p)", 3 * WHOLE),
        (f"ROOT %y = {CHIP} add(%p, %c)", WHOLE),
        (f"ROOT %y = {CHIP} add(%c, %c)", 0),
        (f"ROOT %y = {HBM} copy(%c)", WHOLE),
        (f"ROOT %y = ({HBM}, {CHIP}) sort(%p, %c), dimensions={{0}}", 2 * WHOLE),
        (f"ROOT %y = {HBM} bitcast(%p)", 0),
        (f"ROOT %y = ({HBM}, {CHIP}) tuple(%p, %c)", 0),
        (f'ROOT %y = {HBM} custom-call(), custom_call_target="AllocateBuffer"', 0),
        (f'ROOT %y = {HBM} custom-call(%p, %c), custom_call_target="tpu_custom_call"', 2 * WHOLE),
        (f"ROOT %y = {ROW} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={{1,128}}", 2 * OF_ROW),
        (f"ROOT %y = {ROW} gather(%p, %i), slice_sizes={{1,128}}", 2 * OF_ROW),
        (f"ROOT %y = {HBM} all-reduce(%p), replica_groups={{{{0,1}}}}", 2 * WHOLE),
    ],
)
def test_an_instruction_moves_operands_and_results_that_lie_in_main_memory(line, expected):
    assert moved(line) == expected


@pytest.mark.parametrize(("declared", "expected"), [(5, 3), (2.25, 0.25), (1, 0)])
def test_a_kernel_reads_what_it_declares_beside_what_is_on_the_chip(declared, expected):
    """It reads a part of its operand in main memory, or more than all; its result always counts."""
    cost = f'{{"bytes_accessed":"{int(declared * WHOLE)}","flops":"1"}}'
    config = f'backend_config={{"custom_call_config":{{"cost_estimate":{cost}}}}}'
    call = f'ROOT %y = {HBM} custom-call(%p, %c), custom_call_target="tpu_custom_call", {config}'
    assert moved(call) == (1 + expected) * WHOLE


def test_an_update_in_place_moves_the_update():
    row = f"%r = {ROW} slice(%p), slice={{[0:1], [0:128]}}"
    update = f"ROOT %y = {HBM} dynamic-update-slice(%p, %r, %i, %i)"
    assert moved(row, update) == 2 * OF_ROW + 2 * OF_ROW


@pytest.mark.parametrize(
    ("target", "source", "expected"), [(CHIP, "p", WHOLE), (HBM, "c", WHOLE), (HBM, "p", 2 * WHOLE)]
)
def test_an_asynchronous_copy_counts_once_and_not_where_it_is_read_on_the_chip(
    target, source, expected
):
    start = f"%s = ({target}, {HBM}, u32[]{{:S(2)}}) copy-start(%{source})"
    done = f"%d = {target} copy-done(%s)"
    reads = f"%y = {CHIP} add(%d, %d)", f"ROOT %z = {CHIP} add(%d, %y)"
    read_again = 3 * WHOLE if target == HBM else 0
    assert moved(start, done, *reads) == expected + read_again


def test_an_asynchronous_slice_reads_the_slice():
    start = f"%s = (({HBM}), {ROW}, s32[]{{:S(2)}}) slice-start(%p), slice={{[0:1], [0:128]}}"
    done = "ROOT %d = f32[1,128]{1,0:T(1,128)S(1)} slice-done(%s)"
    assert moved(start, done) == OF_ROW


def test_a_wrapped_operation_counts_once_though_three_instructions_name_it():
    wrapped = computation("%wrapped", f"%x = {HBM} parameter(0)", f"ROOT %y = {CHIP} negate(%x)")
    pair = f"(({HBM}), {CHIP}, u32[]{{:S(2)}})"
    lines = (
        f"%s = {pair} async-start(%p), calls=%wrapped",
        f"%u = {pair} async-update(%s), calls=%wrapped",
        f"ROOT %d = {CHIP} async-done(%u), calls=%wrapped",
    )
    assert moved(*lines, called=wrapped) == WHOLE


def test_a_slice_of_what_an_inner_fusion_returns_as_it_is_reads_the_slice():
    inner = computation("%inner", f"%x = {HBM} parameter(0)", f"ROOT %y = {HBM} copy(%x)")
    outer = computation(
        "%outer",
        f"%x = {HBM} parameter(0)",
        f"%j = {INDEX} parameter(1)",
        f"%v = {HBM} fusion(%x), calls=%inner, output_to_operand_aliasing={{{{}}: (0, {{}})}}",
        f"ROOT %y = {ROW} dynamic-slice(%v, %j, %j)",
    )
    fusion = f"ROOT %f = {ROW} fusion(%p, %i), calls=%outer"
    assert moved(fusion, called=inner + outer) == 2 * OF_ROW


@pytest.mark.parametrize(
    ("inside", "result", "expected"),
    [
        ((f"ROOT %y = {HBM} negate(%x)",), HBM, 2 * WHOLE),
        ((f"ROOT %y = {CHIP} multiply(%x, %x)",), CHIP, WHOLE),
        (
            (f"%v = {HBM} bitcast(%x)", f"ROOT %y = {ROW} dynamic-slice(%v, %j, %j)"),
            ROW,
            2 * OF_ROW,
        ),
        (
            (
                f"%s = {ROW} dynamic-slice(%x, %j, %j)",
                f"%n = {ROW} negate(%s)",
                f"%u = {HBM} dynamic-update-slice(%x, %n, %j, %j)",
                f"ROOT %y = {HBM} bitcast(%u)",
            ),
            HBM,
            2 * OF_ROW,
        ),
        (
            (
                f"%s = {ROW} slice(%x), slice={{[0:1], [0:128]}}",
                f"%u = {HBM} dynamic-update-slice(%x, %s, %j, %j)",
                f"ROOT %y = ({ROW}, {HBM}) tuple(%s, %u)",
            ),
            f"({ROW}, {HBM})",
            3 * OF_ROW,
        ),
        ((f"ROOT %y = {HBM} bitcast(%x)",), HBM, 2 * WHOLE),
    ],
    ids=["whole", "whole-twice", "slice-of-a-view", "in-place", "two-results", "view"],
)
def test_a_fusion_moves_what_is_read_and_written_inside(inside, result, expected):
    parameters = (f"%x = {HBM} parameter(0)", f"%j = {INDEX} parameter(1)")
    fused = computation("%fused", *parameters, *inside)
    fusion = f"ROOT %f = {result} fusion(%p, %i), kind=kLoop, calls=%fused"
    assert moved(fusion, called=fused) == expected


def test_a_collective_spread_over_fusions_reads_its_operand_and_writes_its_result_once():
    """The fusions start it, carry it beside a product, and end it; each passes its arrays on."""
    flag = "u32[]{:S(2)}"
    x, y = f"%x = {HBM} parameter(0)", f"%y = {HBM} parameter(1)"
    start = computation(
        "%start", x, f'ROOT %t = ({HBM}, {HBM}, {flag}) custom-call(%x), custom_call_target="Start"'
    )
    beside = computation(
        "%beside",
        x,
        y,
        f"%z = {HBM} parameter(2)",
        f"%n = {HBM} negate(%z)",
        f"%g = {HBM} all-reduce(%x)",
        f"ROOT %t = ({HBM}, {HBM}, {HBM}, {HBM}) tuple(%n, %x, %y, %g)",
    )
    done = computation(
        "%done", x, y, f'ROOT %t = {HBM} custom-call(%x, %y), custom_call_target="D"'
    )
    lines = (
        f"%s = ({HBM}, {HBM}, {flag}) fusion(%p), calls=%start, "
        "output_to_operand_aliasing={{0}: (0, {})}",
        f"%x0 = {HBM} get-tuple-element(%s), index=0",
        f"%y0 = {HBM} get-tuple-element(%s), index=1",
        f"%b = ({HBM}, {HBM}, {HBM}, {HBM}) fusion(%x0, %y0, %p), calls=%beside, "
        "output_to_operand_aliasing={{1}: (0, {}), {2}: (1, {}), {3}: (1, {})}",
        f"%x1 = {HBM} get-tuple-element(%b), index=1",
        f"%y1 = {HBM} get-tuple-element(%b), index=2",
        f"ROOT %d = {HBM} fusion(%x1, %y1), calls=%done, "
        "output_to_operand_aliasing={{}: (1, {})}",
    )
    product = 2 * WHOLE
    assert moved(*lines, called=start + beside + done) == 2 * WHOLE + product


def loop(limit: str) -> int:
    """Return a loop that reads a row of %p in each iteration, from 0 up to `limit`."""
    state = f"(s32[], {HBM}, s32[])"
    condition = computation(
        "%condition",
        f"%s = {state} parameter(0)",
        "%n = s32[] get-tuple-element(%s), index=0",
        f"%limit = s32[] {limit}",
        "ROOT %lt = pred[] compare(%n, %limit), direction=LT",
    )
    body = computation(
        "%body",
        f"%s = {state} parameter(0)",
        "%n = s32[] get-tuple-element(%s), index=0",
        f"%x = {HBM} get-tuple-element(%s), index=1",
        "%end = s32[] get-tuple-element(%s), index=2",
        "%one = s32[] constant(1)",
        "%next = s32[]{:S(6)} add(%n, %one)",
        "%row = f32[1,128]{1,0:T(1,128)S(1)} dynamic-slice(%x, %n, %n)",
        f"ROOT %out = {state} tuple(%next, %x, %end)",
    )
    lines = (
        "%zero = s32[] constant(0)",
        f"%init = {state} tuple(%zero, %p, %i)",
        f"ROOT %loop = {state} while(%init), condition=%condition, body=%body",
    )
    return moved(*lines, called=condition + body)


def test_a_loop_counts_with_its_turns_and_one_of_unknown_length_once():
    turn = OF_ROW + 4 * 4
    assert loop("constant(8)") == 8 * turn
    assert loop("get-tuple-element(%s), index=2") == turn


def test_of_branches_the_one_that_moves_least_counts():
    parameter = f"%x = {HBM} parameter(0)"
    some = computation("%some", parameter, f"ROOT %y = {CHIP} negate(%x)")
    more = computation("%more", parameter, f"%y = {HBM} negate(%x)", f"ROOT %z = {CHIP} negate(%y)")
    branches = f"ROOT %y = {CHIP} conditional(%i, %p, %p), branch_computations={{%some, %more}}"
    assert moved(branches, called=some + more) == WHOLE


SHAPES = [jax.ShapeDtypeStruct(sizes, "float32") for sizes in ((64, 256), (256, 256))]


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: jnp.tanh(x @ w) @ w,
        lambda x, w: lax.dynamic_slice(w, (3, 0), (8, 256)) * 2,
        lambda x, w: jnp.sort(x) + x.sum(0, keepdims=True),
    ],
    ids=["products", "slice", "sort"],
)
def test_without_memory_on_the_chip_it_is_what_xla_counts(function):
    executable = jax.jit(function).lower(*SHAPES).compile()
    xla = (executable.cost_analysis() or {})["bytes accessed"]
    assert hbm_bytes(executable.as_text() or "") == xla


@pytest.mark.tpu_compile
def test_a_tpu_reads_a_weight_once_for_many_products():
    def many_products(x, w):
        for _ in range(4):
            x = jnp.tanh(x @ w)
        return x

    device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
    placed = jax.jit(many_products, in_shardings=SingleDeviceSharding(device))
    executable = placed.lower(*SHAPES).compile()
    x, w = (math.prod(one.shape) * 4 for one in SHAPES)
    assert hbm_bytes(executable.as_text() or "") == x + w + x
    assert (executable.cost_analysis() or {})["bytes accessed"] > 4 * w
