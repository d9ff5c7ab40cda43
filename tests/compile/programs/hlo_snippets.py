"""Small programs as text, for tests of the readers."""

WIDE, NARROW = "f32[8,128]{1,0}", "bf16[8,128]{1,0}"
WIDE_BYTES, NARROW_BYTES = 8 * 128 * 4, 8 * 128 * 2
CHIP = "f32[8,128]{1,0:T(8,128)S(1)}"

HEAD = """HloModule jit_graph, is_scheduled=true, input_output_alias={ {0}: (1, {}, may-alias) }

FileNames
1 "ROOT/modelzoo/attention/attend.py"
2 "ROOT/compile/graphs/steps.py"
3 "/elsewhere/nnx/module.py"

FunctionNames
1 "attend"

FileLocations
1 {file_name_id=2 function_name_id=1 line=120 end_line=120 column=1 end_column=2}
2 {file_name_id=1 function_name_id=1 line=45 end_line=45 column=1 end_column=2}
3 {file_name_id=3 function_name_id=1 line=7 end_line=7 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}
3 {file_location_id=3 parent_frame_id=3}
4 {file_location_id=3 parent_frame_id=2}
"""
"""Frame 2 is a line of attention, called from frame 1. Frames 3 and 4 are of a library: frame 2
calls frame 3, and frame 1 calls frame 4."""
ARGUMENTS = (
    f"%w = {WIDE} parameter(0), metadata={{op_name=\"parameters['layers.3.up']\"}}",
    f'%k = {NARROW} parameter(1), metadata={{op_name="arguments[0].cache[3].k_BS[0]"}}',
    "%n = s32[] parameter(2)",
)


def computation(name: str, *lines: str) -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"{name} (x: f32[8,128]) -> f32[8,128] {{\n{body}\n}}\n"


def program(*lines: str, called: str = "", root: str = "/anywhere") -> str:
    """Return a program with weights %w, a cache %k that it may overwrite, and a number %n."""
    entry = computation("ENTRY %main", *ARGUMENTS, *lines)
    return f"{HEAD.replace('ROOT', root)}\n{called}\n{entry}"


def loop(
    name: str, turns: int | None, *body: str, state: str = WIDE, init: str = "w", source: str = ""
) -> tuple[str, str]:
    """Return a loop's computations, and the line that runs it over %init (%x in its body).

    The body's lines end with the next %y. Without `turns` the text leaves open how many there are.
    """
    of = f"(s32[], {state}, s32[])"
    limit = "get-tuple-element(%s), index=2" if turns is None else f"constant({turns})"
    condition = computation(
        f"%{name}_condition",
        f"%s = {of} parameter(0)",
        "%i = s32[] get-tuple-element(%s), index=0",
        f"%limit = s32[] {limit}",
        "ROOT %lt = pred[] compare(%i, %limit), direction=LT",
    )
    inside = computation(
        f"%{name}_body",
        f"%s = {of} parameter(0)",
        "%i = s32[]{:T(128)S(6)} get-tuple-element(%s), index=0",
        f"%x = {state} get-tuple-element(%s), index=1",
        "%end = s32[]{:T(128)S(6)} get-tuple-element(%s), index=2",
        "%one = s32[]{:T(128)S(6)} constant(1)",
        "%next = s32[]{:T(128)S(6)} add(%i, %one)",
        *body,
        f"ROOT %out = {of} tuple(%next, %y, %end)",
    )
    lines = (
        f"%{name}_zero = s32[] constant(0)",
        f"%{name}_init = {of} tuple(%{name}_zero, %{init}, %n)",
        f"%{name} = {of} while(%{name}_init), condition=%{name}_condition, body=%{name}_body, "
        f'metadata={{op_name="{source}" stack_frame_id=2}}',
    )
    return condition + inside, "\n  ".join(lines)
