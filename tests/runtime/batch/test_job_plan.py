"""The plan of a job: the note on rows without `max_tokens`, and replies to every override."""

import json
import tomllib
from dataclasses import replace

import jax
import numpy as np
import pytest
from alike import changed
from hypothesis import given, settings
from hypothesis import strategies as st
from model_on_disk import MAX_POSITION, write_model
from planning_models import SPARSE
from related_prompts import table_of
from tiny import CONFIG

from noria.compile.grids.grid_defaults import GridDefaults
from noria.compile.grids.prefix_table import NOTHING_SHARED
from noria.compile.grids.row_shape import RowShape
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.compile.planning.run_bounds import ExpectedRow
from noria.compile.targets import Target, find_target
from noria.modelzoo.config import DecoderConfig
from noria.runtime.batch import job_plan
from noria.runtime.batch.batch_model import BatchModel, PlanSource, _JobRows
from noria.runtime.batch.job_plan import PlanBasis, derived_plan
from noria.runtime.batch.plan_report import limit_note, plan_table
from noria.runtime.cli import main
from noria.runtime.devices.graph_memory import MEMORY_SHARE, device_bytes
from noria.runtime.errors import JobError
from noria.runtime.planning.search import simulate_in_order
from noria.runtime.planning.target_work import work_of
from noria.sharding.layout import Layout

MODEL = PlannedModel("tiny", "")
LONG = replace(CONFIG, max_position=8192)
EVEN = changed(LONG, windows=(None,) * 3)
"""The same without windows."""
OPEN = [RowShape(20, None)] * 3 + [RowShape(9, 4)]
VALUES = ["0", "1", "-1", "16", "1.5", "nan", "true", '""', '"x"', "x", "[]", "{}", "[16]", "data"]
VALUES += ["[[16,4]]", '[[16,"a"]]', '[["a",1]]', "[[nan,1]]", "{a=1}", "[{}]", "[[[]]]", "[true]"]
VALUES += ["1979-05-27", "99999999999999999999", "[16,64]", '["data"]', "chunk"]


def plan_of(rows, *overrides) -> Plan:
    target, numbers = find_target("cpu"), Numbers("float32")
    basis = PlanBasis(target, MODEL, numbers, LONG, overrides=overrides)
    return derived_plan(rows, NOTHING_SHARED, basis)


@pytest.fixture
def memory(monkeypatch):
    """Set the memory of the device."""
    return lambda found: monkeypatch.setattr(job_plan, "device_bytes", lambda target: found)


class Device:
    def __init__(self, process_index: int):
        self.process_index = process_index

    def memory_stats(self) -> dict[str, int]:
        if self.process_index != jax.process_index():
            raise RuntimeError("MemoryStats is only supported for addressable PjRt devices.")
        return {"bytes_limit": 80 * 10**9 + 7}


def test_memory_is_that_of_a_device_of_this_process():
    devices = tuple(Device(jax.process_index() + other) for other in (1, 0))
    assert device_bytes(Target("gpu:2", "gpu", devices, True)) == 80 * 10**9


@pytest.fixture
def gpu() -> Target:
    """A device of this machine that counts as a GPU."""
    return replace(find_target("cpu"), name="gpu", platform="gpu")


def plan_on(target: Target, rows, *overrides) -> Plan:
    basis = PlanBasis(target, MODEL, Numbers("float32"), LONG, overrides=overrides)
    return derived_plan(rows, NOTHING_SHARED, basis)


def test_an_accelerator_has_a_slot_for_each_row_up_to_512_and_large_calls(gpu, memory):
    memory(80 * 10**9)
    rows = [RowShape(20, 30)]
    for count in (300, 2000):
        grid = plan_on(gpu, rows * count).buckets
        assert grid.decode_slots == min(count, 512)
        assert max(bucket.length * bucket.batch for bucket in grid.prefill) > 512
        on_cpu = plan_of(rows * count).buckets
        assert on_cpu.decode_slots == 64
        assert max(bucket.length * bucket.batch for bucket in on_cpu.prefill) <= 512


def test_rows_go_on_to_the_models_context_where_it_fits():
    plan = plan_of(OPEN)
    assert plan.buckets.max_length == LONG.max_position
    assert plan.max_length_reason == "" and limit_note(plan, OPEN, LONG.max_position) is None


def test_a_limit_of_memory_is_said_in_the_plan_and_with_the_option_that_changes_it(memory):
    memory(10_000_000)
    plan = plan_of(OPEN)
    assert 544 < plan.buckets.max_length < LONG.max_position
    assert "more than 0.125 of the memory that weights leave (0.0 GB" in plan.max_length_reason
    assert Plan.from_table(tomllib.loads(plan.to_toml())) == plan
    said = limit_note(plan, OPEN, LONG.max_position)
    assert said.startswith(
        f"3 rows without max_tokens: at most {plan.buckets.max_length} tokens each, prompt "
        f"included, of the model's 8192: a longer cache would take more than 0.125"
    )
    longer = plan_of(OPEN, "buckets.max_length=4096")
    assert longer.buckets.max_length == 4096 and not longer.max_length_reason
    assert "of the model's 8192: as the plan or --set says" in limit_note(longer, OPEN, 8192)


def test_memory_limits_no_row_that_has_max_tokens(memory):
    memory(0)
    rows = [RowShape(20, 4000)]
    plan = plan_of(rows)
    assert plan.buckets.max_length == 4032 and not plan.max_length_reason
    assert limit_note(plan, rows, LONG.max_position) is None


def test_what_is_expected_is_planned_where_nothing_fits(memory):
    memory(0)
    assert plan_of(OPEN).buckets.max_length == 20 + 12 + GridDefaults().unspecified_output


EMBEDDED = DecoderConfig.alike(
    vocab_size=49152,
    embed=576,
    mlp=1536,
    num_query_heads=9,
    num_kv_heads=3,
    head_dim=64,
    windows=(None,) * 30,
    max_position=8192,
    tie_embeddings=True,
)
LENGTHS = [67, 80, 100, 120, 130, 150, 190, 220, 250, 270, 300, 330, 350, 380, 390, 399]


def embedded_plan(rows, dtype="float32", overrides=()) -> Plan:
    """Return a plan for the embedded model's shapes, which test the constants."""
    target, numbers = find_target("cpu"), Numbers(dtype)
    basis = PlanBasis(target, MODEL, numbers, EMBEDDED, overrides=overrides)
    return derived_plan(rows, NOTHING_SHARED, basis)


@pytest.mark.parametrize(
    ("times", "prefill"),
    [
        # 16 rows save too little for a second graph
        (1, [[400, 1]]),
        (4, [[192, 2], [400, 1]]),
        # with more rows than slots every length pays
        (64, "six"),
    ],
)
def test_a_derived_grid_has_the_graphs_that_save_what_they_take(times, prefill):
    grid = embedded_plan([RowShape(n, 64) for n in LENGTHS] * times).buckets
    found = grid.to_table()["prefill"]
    assert ("six" if len(found) == 6 else found) == prefill
    assert grid.max_length == 464


@settings(deadline=None, max_examples=25)
@given(
    st.lists(
        st.tuples(st.integers(1, 90), st.one_of(st.none(), st.integers(0, 40)), st.integers(1, 3)),
        min_size=1,
        max_size=90,
    ),
    st.sampled_from([(), ("buckets.chunk=16",), ("buckets.decode_slots=8",)]),
)
def test_every_call_of_a_schedule_has_a_graph_whatever_rows_emit(needs, overrides):
    rows = [RowShape(*need) for need in needs]
    grid = plan_of(rows, *overrides).buckets
    assert plan_of(rows, *overrides).buckets == grid
    for share in (0.2, 1):
        most = [50 if row.max_tokens is None else row.max_tokens for row in rows]
        expected = [ExpectedRow(row, round(share * n)) for row, n in zip(rows, most, strict=True)]
        metrics = simulate_in_order(expected, grid, None).metrics
        assert set(metrics.prefill) <= {str(bucket) for bucket in grid.prefill}
        emitted = sum(row.output * row.need.num_sequences for row in expected)
        assert metrics.emitted_tokens == emitted


def test_parts_and_processors_leave_out_the_same_graphs():
    """The choice is the same for both dtypes on the CPU, and at each repetition."""
    rows = [RowShape(n, 64) for n in LENGTHS] * 4
    grids = {embedded_plan(rows).buckets for _ in range(3)}
    assert len(grids) == 1
    assert embedded_plan(rows, "bfloat16").buckets == grids.pop()


def keys(table, prefix=""):
    for key, value in table.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{key}.")


KEYS = [*keys(tomllib.loads(plan_of(OPEN).to_toml()))]
KEYS += [
    "a",
    "a.b",
    "buckets.page",
    "buckets.pages",
    "buckets.chunk",
    "buckets.slot_groups",
    "mesh.data",
]
KEYS += ["rules.batch", "decode.rules.batch", "attention.prefill", "experts.overflow", "layout"]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(VALUES)), min_size=1, max_size=3),
    st.booleans(),
)
def test_any_override_gives_a_plan_or_says_what_is_wrong(chosen, is_given):
    overrides = list(map("=".join, chosen))
    try:
        if is_given:
            table = tomllib.loads(plan_of(OPEN).to_toml())
            found = job_plan.given_plan(table, overrides)
        else:
            found = plan_of(OPEN, *overrides)
    except ValueError as error:
        assert "expected" in str(error) or "--set" in str(error)
    else:
        assert isinstance(found, Plan)


def test_rows_that_end_at_the_limit_are_counted(tmp_path, capsys):
    model, source, output = (tmp_path / name for name in ("model", "in.jsonl", "out.jsonl"))
    write_model(model)
    rows = [{"id": "open", "prompt": [5, 6, 7]}, {"id": "limited", "prompt": [5], "max_tokens": 2}]
    bias = {"logit_bias": {"2": -100}}  # only the limit ends these rows
    source.write_text("".join(json.dumps(row | bias) + "\n" for row in rows))
    job = ["batch", "-i", source, "-o", output, "--model", model, "--target", "cpu"]
    job += ["--set", "buckets.max_length=12"]
    assert main([*map(str, job)]) == 0
    said = capsys.readouterr().err
    note = "1 row without max_tokens: at most 12 tokens each, prompt included, of the model's "
    assert said.count(f"{note}{MAX_POSITION}: ") == 1
    assert "1 without max_tokens ended at the plan's max_length" in said
    manifest = json.loads((tmp_path / "out.jsonl.manifest.json").read_text())
    assert manifest["rows"]["ok_at_max_length"] == 1
    assert "max_length = 12\n" in manifest["plan"]


def prompts_about_documents(count: int, documents: int, length: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    beginnings = rng.integers(0, 9, (documents, length)).tolist()
    return [beginnings[i % documents] + rng.integers(0, 9, 20).tolist() for i in range(count)]


def sharing_plan(*overrides: str, documents: int = 4, layout=None, max_tokens=8) -> Plan:
    """Return the derived plan of questions about documents."""
    prompts = prompts_about_documents(150, documents, 500)
    table, _ = table_of(prompts)
    rows = [RowShape(len(prompt), max_tokens) for prompt in prompts]
    target = find_target("cpu" if layout is None else f"cpu:{layout.mesh.num_devices}")
    basis = PlanBasis(target, MODEL, Numbers("float32"), EMBEDDED, layout, overrides)
    return derived_plan(rows, table, basis)


def test_questions_about_documents_share_pages_that_groups_read():
    plan = sharing_plan()
    assert len(plan.buckets.prefixes.shared) == 4 and plan.buckets.chunks
    assert {prefix.length for prefix in plan.buckets.prefixes.shared} == {496}
    assert Plan.from_table(tomllib.loads(plan.to_toml())) == plan


@pytest.mark.parametrize("asked", ["chunk=16", "prefill=[[528,1]]"])
def test_keys_that_decide_about_prompts_give_a_grid_without_prefixes(asked):
    buckets = sharing_plan(f"buckets.{asked}").buckets
    assert buckets.prefixes is None


def test_a_limit_that_no_row_fits_is_no_failure_of_the_plan():
    assert sharing_plan("buckets.max_length=300").buckets.max_length == 300


def test_prompts_share_their_beginnings_under_layouts_of_all_kinds():
    rules = {"name": "mine", "mesh": {"sequence": 2}, "rules": {}}
    split = {"prefill": {"rules": {"length": "sequence"}}}
    alike = split | {"decode": {"rules": {"cache_length": "sequence"}}}
    for table in (rules | alike, rules | split):
        grid = sharing_plan(layout=Layout.from_table(table)).buckets
        assert grid.prefixes is not None and grid.chunks


def test_a_stored_plan_of_another_version_names_it_and_the_remedy():
    table = "[structured]\nstates = 2\nclasses = 2\nmasks = 2\nschemas = []\n"
    text = plan_of(OPEN).to_toml() + table
    model = BatchModel(None, PlanSource("cpu"))
    with pytest.raises(JobError, match=r"'mask_blocks', 'move_blocks'.* begun by another .*--rest"):
        model._open(_JobRows([], {}, NOTHING_SHARED), text)


def test_a_derived_plan_has_the_pages_that_its_rows_fill():
    rows = [RowShape(20, 30), RowShape(100, 100), RowShape(9, 4)]
    grid = plan_of(rows, "buckets.page=16").buckets
    assert grid.page == 16
    assert grid.pages == 4 + 13 + 1, "all rows at their longest"
    given = plan_of(rows, "buckets.page=16", "buckets.pages=15").buckets
    assert (given.pages, given.decode_slots) == (15, grid.decode_slots)
    many = plan_of([RowShape(20, 30)] * 400, "buckets.page=16", "buckets.decode_slots=256").buckets
    assert (many.decode_slots, many.pages) == (256, 256 * 4)
    chunks = plan_of(rows, "buckets.page=16", "buckets.chunk=32").buckets
    assert chunks.pages == 18 and chunks.chunks == (32,)
    # as many pieces as three of the longest prompts have
    assert chunks.prefill == ((chunks.max_length, 3 * 4, 32),)


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_an_accelerator_has_as_many_slots_as_fill_the_pages_in_its_memory(platform, memory):
    target = replace(find_target("cpu"), name=platform, platform=platform)
    work = work_of(LONG, Numbers("float32"), None, target)
    rows = [RowShape(20, 40), RowShape(20, 100)]  # one page and two

    def grid_of(times: int):
        grid = plan_on(target, rows * times).buckets
        assert grid.page == 64
        return grid

    memory(80 * 10**9)
    # as many as rows, and as many as an accelerator has at most
    assert [grid_of(times).decode_slots for times in (20, 1000)] == [40, 512]
    # as many as rows are expected to fill the pool
    memory(int((work.parameter_bytes + work.page_bytes(64) * 60.5) / MEMORY_SHARE))
    assert (grid_of(1000).pages, grid_of(1000).decode_slots) == (60, 40)
    pages_of_codes = plan_on(target, rows, "numbers.cache=int8").buckets.page
    assert pages_of_codes == {"gpu": 64, "tpu": 128}[platform]
    # a device that does not say how much memory it has
    memory(0)
    assert grid_of(1000).decode_slots == 512


def test_the_number_of_pages_may_be_given_without_their_size(gpu):
    rows = [RowShape(20, 40), RowShape(20, 100)] * 50
    grid = plan_on(gpu, rows, "buckets.pages=30").buckets
    assert (grid.page, grid.pages, grid.decode_slots) == (64, 30, 20)
    with pytest.raises(ValueError, match=r"buckets\.pages: expected at least 2"):
        plan_on(gpu, rows, "buckets.pages=1")


def test_a_cpu_has_the_pages_that_a_share_of_its_memory_holds_and_those_of_a_row(memory):
    rows = [RowShape(20, 4000)] * 9
    work = work_of(EVEN, Numbers("float32"), None, find_target("cpu"))
    basis = PlanBasis(find_target("cpu"), MODEL, Numbers("float32"), EVEN)

    def pages(room: int) -> int | None:
        share = GridDefaults().cpu_cache_share
        memory(int(work.parameter_bytes + room * work.page_bytes(64) / share) + 1)
        grid = derived_plan(rows, NOTHING_SHARED, basis).buckets
        assert (grid.decode_slots, grid.num_pages(grid.max_length)) == (9, 63)
        return grid.pages

    assert [pages(room) for room in (1000, 500, 0)] == [9 * 63, 500, 63]


def test_pages_that_cannot_be_are_refused_by_name(gpu, memory):
    rows = [RowShape(20, 4000)] * 9
    # a kernel that reads no pages, and jobs without slots
    plan_on(gpu, rows, 'attention.prefill="xla"', "buckets.chunk=16")
    for value in ("0", "24"):
        with pytest.raises(ValueError, match=r"buckets\.page: expected"):
            plan_on(gpu, rows, f"buckets.page={value}")
    for key, value in (
        ("decode_spans", "[64,4032]"),
        ("span_slots", "[9]"),
        ("decode_graphs", "[4032]"),
    ):
        with pytest.raises(ValueError, match=key):
            plan_on(gpu, rows, f"buckets.{key}={value}")
    scored = plan_on(gpu, [RowShape(20, 0, is_scored=True)] * 3).buckets
    assert (scored.decode_slots, scored.page) == (0, None)
    # no room for the pages of a row
    memory(work_of(LONG, Numbers("float32"), None, gpu).parameter_bytes)
    with pytest.raises(ValueError, match=r"buckets.page: expected room for 63 pages of 64"):
        plan_on(gpu, rows)


def test_an_accelerator_has_as_many_slots_as_rows_are_expected_to_fill_its_pages(gpu, memory):
    """Most rows are short, and one is long."""
    rows = [*[RowShape(20, 40)] * 3000, RowShape(20, 4000)]
    basis = PlanBasis(gpu, MODEL, Numbers("float32"), EVEN, overrides=["buckets.page=16"])
    work = work_of(EVEN, Numbers("float32"), None, gpu)
    memory(80 * 10**9)
    full = derived_plan(rows, NOTHING_SHARED, basis).buckets
    assert full.decode_slots == 512 and full.pages == 511 * 4 + 252
    memory(int((work.parameter_bytes + work.page_bytes(16) * 400.5) / MEMORY_SHARE))
    few = derived_plan(rows, NOTHING_SHARED, basis).buckets
    assert few.pages == 400 and few.decode_slots == int(400.5 / ((3000 * 4 + 252) / 3001))
    windows = derived_plan(rows, NOTHING_SHARED, replace(basis, config=LONG)).buckets
    assert windows.row_tokens == 1 and windows.decode_slots > few.decode_slots
    memory(int((work.parameter_bytes + work.page_bytes(16) * 250) / MEMORY_SHARE))
    with pytest.raises(ValueError, match=r"buckets.page: expected room for 25\d pages of 16"):
        derived_plan(rows, NOTHING_SHARED, basis)


def test_rows_without_max_tokens_have_room_for_one_of_the_models_context(gpu, memory):
    basis = PlanBasis(gpu, MODEL, Numbers("float32"), EVEN, overrides=["buckets.page=64"])
    work = work_of(EVEN, Numbers("float32"), None, gpu)
    memory(int((work.parameter_bytes + 2.505 * work.page_bytes(8192)) / MEMORY_SHARE))
    grid = derived_plan([RowShape(20, None)] * 100, NOTHING_SHARED, basis).buckets
    assert grid.max_length == 8192 and grid.pages == 320
    assert grid.decode_slots == 320 // 9


def test_the_table_of_a_plan_says_how_many_pages_the_cache_has():
    plan = plan_of([RowShape(20, 30)], "buckets.page=16")
    said = plan_table(plan, work_of(LONG, Numbers("float32"), None, find_target("cpu")))
    assert "in 4 pages of 16 entries" in said and "in a call of rows up to 64 tokens" in said


def test_experts_with_a_capacity_have_pages_for_all_rows(gpu, memory):
    """Otherwise rows that are computed again would decide what a capacity drops."""
    basis = PlanBasis(gpu, MODEL, Numbers("float32"), SPARSE)
    capacity = 'experts.decode={dispatch="capacity",capacity_factor=2.0}'
    work = work_of(SPARSE, Numbers("float32"), None, gpu)
    rows = [RowShape(20, 100), RowShape(20, 8)] * 100
    memory(int((work.parameter_bytes + 90.5 * work.page_bytes(64)) / MEMORY_SHARE))
    grid = derived_plan(rows, NOTHING_SHARED, basis).buckets
    assert grid.pages == 90 < grid.most_pages
    plan = derived_plan(rows, NOTHING_SHARED, replace(basis, overrides=[capacity]))
    assert plan.buckets.decode_slots == 45 and plan.buckets.pages == 90 == plan.buckets.most_pages
    assert plan.experts is not None and plan.experts.decode.kind == "capacity"
