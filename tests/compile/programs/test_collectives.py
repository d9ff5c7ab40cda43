"""Collectives read from program text, in every form that compilers write.

The snippets are shortened from real text of CPU, TPU and GPU programs.
"""

from dataclasses import replace

import pytest

from noria.compile.programs.collectives import Collective, read_collectives

SIZES = {"data": 2, "tensor": 4}
TENSOR = "replica_groups={{0,1,2,3},{4,5,6,7}}"


def program(*entry: str, called: str = "") -> str:
    lines = "\n".join(f"  {line}" for line in entry)
    header = "HloModule jit_f, is_scheduled=true, num_partitions=8"
    return f"{header}\n\n{called}\n\nENTRY %main (p: f32[8,16]) -> f32[8,16] {{\n{lines}\n}}\n"


def read(*entry: str, called: str = "") -> list[Collective]:
    """Read the collectives of an entry with a parameter %p of f32[8,16] (512 bytes)."""
    parameter = "%p = f32[8,16]{1,0:T(8,128)S(1)} parameter(0)"
    return read_collectives(program(parameter, *entry, called=called), SIZES)


def read_one(*entry: str, called: str = "") -> Collective:
    (found,) = read(*entry, called=called)
    return found


# ---- axes


@pytest.mark.parametrize(
    ("groups", "mesh_axes", "group_size"),
    [
        ("{{0,1,2,3},{4,5,6,7}}", ("tensor",), 4),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",), 2),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "tensor"), 8),
        ("{}", ("data", "tensor"), 8),
        ("[2,4]<=[8]", ("tensor",), 4),
        ("[4,2]<=[2,4]T(1,0)", ("data",), 2),
        ("[1,8]<=[8]", ("data", "tensor"), 8),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", ("tensor",), 4),
        ("mesh['axis_0'=2,'axis_1'=1,'axis_2'=4] {'axis_0'}", ("data",), 2),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", ("data", "tensor"), 8),
        ("mesh['axis_0'=2,'axis_1'=4], device_ids=([4,2]T(1,0)) {'axis_1'}", ("data", "tensor"), 4),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}", ("tensor",), 2),
    ],
)
def test_groups_run_along_mesh_axes(groups, mesh_axes, group_size):
    found = read_one(f"%r = f32[8,16]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={groups}")
    assert (found.mesh_axes, found.group_size) == (mesh_axes, group_size)


@pytest.mark.parametrize(
    "groups",
    [
        "{{0,1},{2,3},{4,5},{6,7}}",
        "[4,2]<=[8]",
        "mesh['axis_0'=4,'axis_1'=2], device_ids=([2,2,2]T(0,2,1)) {'axis_0':(2)2}",
    ],
)
def test_a_part_of_an_axis_is_told_by_the_group_size(groups):
    found = read_one(f"%r = f32[8,16]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={groups}")
    assert (found.mesh_axes, found.group_size) == (("tensor",), 2)


@pytest.mark.parametrize(
    ("pairs", "mesh_axes"),
    [
        ("{{0,1},{1,2},{2,3},{3,0},{4,5},{5,6},{6,7},{7,4}}", ("tensor",)),
        ("{{0,4},{4,0},{1,5},{5,1},{2,6},{6,2},{3,7},{7,3}}", ("data",)),
        ("{{0,1},{1,2},{2,3},{3,4},{4,5},{5,6},{6,7},{7,0}}", ("data", "tensor")),
        ("{{0,0},{1,4},{2,1},{3,5},{4,2},{5,6},{6,3},{7,7}}", ("data", "tensor")),
    ],
)
def test_a_permute_moves_along_the_axes_in_which_its_pairs_differ(pairs, mesh_axes):
    found = read_one(f"%r = f32[8,16]{{1,0}} collective-permute(%p), source_target_pairs={pairs}")
    assert (found.kind, found.mesh_axes, found.group_size) == ("collective-permute", mesh_axes, 2)


@pytest.mark.parametrize(
    "line",
    [
        "%r = f32[8,16]{1,0} all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}",
        "%r = f32[8,16]{1,0} all-gather(%p), replica_groups=[8,1]<=[8], dimensions={0}",
        "%r = f32[8,16]{1,0} collective-permute(%p), source_target_pairs={{0,0},{1,1}}",
        "%r = f32[8,16]{1,0} collective-permute(%p), source_target_pairs={}",
    ],
)
def test_what_stays_on_its_device_is_no_communication(line):
    assert read(line) == []


# ---- bytes


@pytest.mark.parametrize(
    ("line", "kind", "num_bytes"),
    [
        ("%r = f32[8,16]{1,0} all-reduce(%p)", "all-reduce", 512),
        ("%r = f32[8,64]{1,0} all-gather(%p), dimensions={1}", "all-gather", 2048),
        ("%r = f32[2,16]{1,0} reduce-scatter(%p), dimensions={0}", "reduce-scatter", 512),
        ("%r = f32[8,16]{1,0} all-to-all(%p), dimensions={0}", "all-to-all", 512),
        ("%r = f32[8,16] all-reduce-start(%p)", "all-reduce", 512),
        ("%r = (f32[8,16], f32[8,64]) all-gather-start(%p)", "all-gather", 2048),
        ("%r = ((f32[8,16]), f32[2,16], u32[]) reduce-scatter-start(%p)", "reduce-scatter", 512),
        ("%r = ((f32[8,16]), f32[8,16]) all-to-all-start(%p)", "all-to-all", 512),
    ],
)
def test_bytes_are_of_the_whole_array_whether_asynchronous_or_not(line, kind, num_bytes):
    found = read_one(f"{line}, channel_id=1, {TENSOR}")
    assert (found.kind, found.num_bytes, found.arrays) == (kind, num_bytes, ("f32[8,16]",))


def test_an_asynchronous_permute_counts_once():
    found = read_one(
        "%s = (f32[8,16]{1,0}, f32[8,16]{1,0}, u32[]{:S(2)}, u32[]{:S(2)}) "
        "collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}",
        "ROOT %d = f32[8,16]{1,0} collective-permute-done(%s)",
    )
    assert found.num_bytes == 512


def test_a_wrapped_collective_counts_once_though_both_halves_name_it():
    called = """%wrapped (x: bf16[8,16]) -> bf16[2,16] {
  %x = bf16[8,16]{1,0} parameter(0)
  ROOT %inner = bf16[2,16]{1,0} reduce-scatter(%x), replica_groups=[2,4]<=[8], dimensions={0}
}"""
    found = read_one(
        "%b = bf16[8,16]{1,0} convert(%p)",
        "%s = ((bf16[8,16]), bf16[2,16], u32[]) async-start(%b), calls=%wrapped",
        "%u = ((bf16[8,16]), bf16[2,16], u32[]) async-update(%s), calls=%wrapped",
        "ROOT %d = bf16[2,16]{1,0} async-done(%u), calls=%wrapped",
        called=called,
    )
    assert (found.kind, found.num_bytes, found.computation) == ("reduce-scatter", 256, "wrapped")


@pytest.mark.parametrize(("kind", "num_bytes"), [("all-reduce", 544), ("all-gather", 2176)])
def test_combined_collectives_count_the_bytes_of_all_their_arrays(kind, num_bytes):
    found = read_one(
        "%q = bf16[16]{0} constant({...})",
        f"%r = (f32[8,16]{{1,0}}, /*index=1*/bf16[16]{{0}}) {kind}(%p, /*index=1*/%q), {TENSOR}",
    )
    assert (found.arrays, found.num_bytes) == (("f32[8,16]", "bf16[16]"), num_bytes)


def test_an_all_to_all_of_pieces_counts_them_together():
    found = read_one(
        "%q = f32[8,16]{1,0} copy(%p)",
        "%r = (f32[8,16]{1,0}, f32[8,16]{1,0}) all-to-all(%p, %q), replica_groups={{0,1},{2,3}}",
    )
    assert found.num_bytes == 1024


# ---- fusions of the TPU


@pytest.mark.parametrize(
    "body",
    [
        """%all-reduce.2 = f32[8,16]{1,0:T(8,128)} all-reduce(%x), GROUPS
  ROOT %kept = f32[2,16]{1,0:T(8,128)} dynamic-slice(%all-reduce.2, %i, %zero)""",
        """%all-reduce.2 = (f32[8,16]{1,0}, f32[8,16]{1,0}) all-reduce(%x, %x), GROUPS
  %y = f32[8,16]{1,0} get-tuple-element(%all-reduce.2), index=0
  ROOT %kept = f32[2,16]{1,0:T(8,128)} dynamic-slice(%y, %i, %zero)""",
    ],
)
def test_a_fused_all_reduce_that_keeps_a_slice_is_a_reduce_scatter(body):
    called = f"""%all-reduce-scatter.1 (x: f32[8,16]) -> f32[2,16] {{
  %x = f32[8,16]{{1,0:T(8,128)S(1)}} parameter(0)
  {body.replace("GROUPS", TENSOR)}
}}"""
    found = read_one(
        "ROOT %f = f32[2,16]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1, "
        'metadata={op_name="jit(f)/dot_general"}',
        called=called,
    )
    assert (found.kind, found.mesh_axes) == ("reduce-scatter", ("tensor",))
    assert found.num_bytes == 512 * len(found.arrays)
    assert found.source == "jit(f)/dot_general"


def test_an_all_reduce_that_is_sliced_afterwards_stays_one():
    found = read_one(
        f"%r = f32[8,16]{{1,0}} all-reduce(%p), {TENSOR}",
        "ROOT %kept = f32[2,16]{1,0} dynamic-slice(%r, %i, %zero)",
    )
    assert found.kind == "all-reduce"


def test_a_collective_spread_over_fusions_counts_where_it_starts():
    spread = f'{TENSOR}, backend_config={{"async_collective_fusion_config":{{"flag_end":"8"}}}}'
    called = "\n\n".join(
        f"""%{name} (x: f32[8,16]) -> f32[32,16] {{
  %x = f32[8,16]{{1,0}} parameter(0)
  %gathered.{name} = f32[32,16]{{1,0}} all-gather(%x), channel_id=1, {spread}
  ROOT %r = f32[32,16]{{1,0}} custom-call(%gathered.{name}), custom_call_target="{target}"
}}"""
        for name, target in [
            ("start", "AsyncCollectiveStart"),
            ("carry", "Product"),
            ("done", "AsyncCollectiveDone"),
        ]
    )
    found = read_one(
        "%s = f32[32,16]{1,0} fusion(%p), kind=kCustom, calls=%start",
        "%c = f32[32,16]{1,0} fusion(%s), kind=kOutput, calls=%carry",
        "ROOT %d = f32[32,16]{1,0} fusion(%c), kind=kCustom, calls=%done",
        called=called,
    )
    assert found.name == "gathered.start"


# ---- calls, branches, refusals

CALLED = f"""%sum (x: f32[8,16]) -> f32[8,16] {{
  %x = f32[8,16]{{1,0}} parameter(0)
  ROOT %r = f32[8,16]{{1,0}} all-reduce(%x), {TENSOR}
}}"""


def test_a_collective_counts_once_per_call_of_its_computation():
    found = read(
        "%a = f32[8,16]{1,0} call(%p), to_apply=%sum",
        "%b = f32[8,16]{1,0} call(%a), to_apply=%sum",
        called=CALLED,
    )
    assert [one.name for one in found] == ["r", "r"]


@pytest.mark.parametrize(
    "branches",
    ["branch_computations={%sum, %sum}", "true_computation=%sum, false_computation=%sum"],
)
def test_every_branch_counts_and_is_marked(branches):
    found = read(f"%c = f32[8,16]{{1,0}} conditional(%q, %p, %p), {branches}", called=CALLED)
    assert [one.is_conditional for one in found] == [True, True]


@pytest.mark.parametrize("opcode", ["ragged-all-to-all", "collective-broadcast", "send"])
def test_communication_that_is_not_understood_is_refused(opcode):
    with pytest.raises(ValueError, match=rf"expected collectives among all-reduce.*got {opcode}"):
        read(f"%r = f32[8,16]{{1,0}} {opcode}(%p), channel_id=1, {TENSOR}")


def test_a_transfer_to_the_host_is_no_collective():
    assert read("%r = (f32[8,16], u32[], token[]) send(%p), is_host_transfer=true") == []


def test_groups_of_an_unknown_form_are_refused():
    with pytest.raises(ValueError, match=r"expected groups of %r as \{\{0,1\},\{2,3\}\}.*got"):
        read("%r = f32[8,16]{1,0} all-reduce(%p), replica_groups=<8x1xi64>")


def test_an_operand_that_is_not_in_the_text_is_refused():
    with pytest.raises(ValueError, match=r"expected names of instructions of %main.*got '%lost'"):
        read(f"%r = f32[8,16]{{1,0}} all-reduce(%lost), {TENSOR}")


def test_a_program_for_another_number_of_devices_is_refused():
    message = r"expected a program for the 4 devices of the mesh \(tensor=4\), got one of 8 part"
    with pytest.raises(ValueError, match=message):
        read_collectives(program("ROOT %p = f32[8,16]{1,0} parameter(0)"), {"tensor": 4})


def test_times_multiply_the_known_loops():
    one = read_one(f"%r = f32[8,16]{{1,0}} all-reduce(%p), {TENSOR}")
    assert (one.times, replace(one, loops=(3, None, 2)).times) == (1, 6)
