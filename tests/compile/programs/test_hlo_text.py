"""Program text: instructions by name, sizes of arrays, and trip counts that are proven."""

import re

import pytest

from noria.compile.programs.hlo_text import array_bytes, read_program, trip_count

# a loop as the TPU's compiler writes it, without a trip count
LOOP = """HloModule jit_f, is_scheduled=true, num_partitions=8

%body (state: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %one = s32[]{:T(128)} constant(STEP)
  %state = (s32[]{:T(128)}, f32[8]{0:T(128)S(1)}, s32[]{:T(128)}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%state), index=0
  %copy = s32[]{:T(128)S(6)} copy(%count)
  %next = s32[]{:T(128)} ADD(%copy, %one), metadata={op_name="jit(f)/while/body/add"}
  %x = f32[8]{0:T(128)S(1)} get-tuple-element(%state), index=1
  %rest = s32[]{:T(128)} get-tuple-element(%state), index=2
  ROOT %out = (s32[]{:T(128)}, f32[8]{0:T(128)S(1)}, s32[]{:T(128)}) tuple(%next, %x, %rest)
}

%condition (state.1: (s32[], f32[8], s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(LIMIT)
  %state.1 = (s32[]{:T(128)}, f32[8]{0:T(128)S(1)}, s32[]{:T(128)}) parameter(0)
  %count.1 = s32[]{:T(128)} get-tuple-element(%state.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%count.1, %limit), direction=LT
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0:T(128)} parameter(0)
  %start = s32[]{:T(128)} constant(START)
  %copy.1 = s32[]{:T(128)} copy(%start)
  %init = (s32[]{:T(128)}, f32[8]{0:T(128)S(1)}, s32[]{:T(128)}) tuple(%copy.1, %p, %start)
  %loop = (s32[]{:T(128)}, f32[8]{0:T(128)S(1)}, /*index=2*/s32[]{:T(128)}) while(%init), condition=%condition, body=%body, backend_config={}
  ROOT %result = f32[8]{0:T(128)} get-tuple-element(%loop), index=1
}
"""  # noqa: E501  (as the compiler writes it)


def trips(**changes: str) -> int | None:
    """Return the trip count of LOOP, which counts from 0 to 8 by 1, with some text replaced."""
    text = LOOP
    for word, value in {"STEP": "1", "ADD": "add", "LIMIT": "8", "START": "0", **changes}.items():
        text = re.sub(rf"\b{word}\b", value, text)
    program = read_program(text)
    entry = program.computations[program.entry]
    return trip_count(program, entry, entry.instructions["loop"])


def test_an_instruction_is_read_with_its_tiled_shape_and_comments():
    program = read_program(LOOP)
    loop = program.computations[program.entry].instructions["loop"]
    assert loop.opcode == "while"
    assert loop.arrays == ("s32[]", "f32[8]", "s32[]")
    assert loop.operands == ("init",)
    assert list(loop.called()) == [("condition", "condition"), ("body", "body")]


def test_layouts_say_in_which_memory_arrays_lie_and_a_token_is_none():
    program = read_program(LOOP.replace("s32[]{:T(128)S(6)} copy", "(s32[]{:S(6)}, token[]) copy"))
    body = program.computations["body"].instructions
    assert body["state"].memory_spaces == (0, 1, 0)
    assert (body["copy"].arrays, body["copy"].memory_spaces) == (("s32[]",), (6,))


def test_the_header_says_for_how_many_devices_the_program_is():
    assert read_program(LOOP).num_partitions == 8
    assert read_program(LOOP.replace(", num_partitions=8", "")).num_partitions == 1


def test_the_source_is_the_operation_of_the_traced_function():
    body = read_program(LOOP.replace("ADD", "add")).computations["body"]
    assert body.instructions["next"].source == "jit(f)/while/body/add"
    assert body.instructions["copy"].source == ""


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match=r"expected a computation that starts with ENTRY, got 'm"):
        read_program("module @jit_f attributes {mhlo.num_partitions = 8 : i32} {")


@pytest.mark.parametrize(
    ("array", "num_bytes"),
    [
        ("f32[8,128]", 4096),
        ("bf16[3,5]", 30),
        ("f32[]", 4),
        ("pred[7]", 7),
        ("f8e4m3fn[16]", 16),
        ("s4[3]", 2),
        ("c64[2]", 16),
        ("f32[<=8,2]", 64),
        ("f32[0,4]", 0),
    ],
)
def test_bytes_follow_from_type_and_sizes(array, num_bytes):
    assert array_bytes(array) == num_bytes


@pytest.mark.parametrize("array", ["token[]", "f32", "(f32[8], f32[8])"])
def test_what_is_no_array_has_no_bytes(array):
    with pytest.raises(ValueError, match=r"expected an array such as bf16\[8,128\], got"):
        array_bytes(array)


def test_a_loop_that_counts_by_one_between_constants_has_a_trip_count():
    assert trips() == 8
    assert trips(START="2", LIMIT="9") == 7
    assert trips(START="9") == 0


@pytest.mark.parametrize(
    "change", [{"STEP": "2"}, {"ADD": "multiply"}, {"LIMIT": "nan"}, {"START": "{0}"}]
)
def test_a_loop_that_counts_otherwise_has_none(change):
    assert trips(**change) is None


def test_a_loop_that_may_end_early_has_no_trip_count():
    early = "ROOT %lt = pred[] and(%a, %b)"
    text = re.sub(r"ROOT %lt = .*", early, LOOP)
    program = read_program(text)
    entry = program.computations[program.entry]
    assert trip_count(program, entry, entry.instructions["loop"]) is None


def test_a_trip_count_that_is_written_down_is_taken():
    assert trips(START="p", backend_config='backend_config={"known_trip_count":{"n":"5"}}, x') == 5
