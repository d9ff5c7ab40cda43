"""The plan of a job: what limits rows without `max_tokens` is said; any override is answered."""

import json
import tomllib
from dataclasses import replace

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from model_on_disk import MAX_POSITION, write_model
from tiny import CONFIG

from noria.compile.default_grid import RowNeed
from noria.compile.grid_defaults import GridDefaults
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.compile.targets import Target, find_target
from noria.runtime.batch import job_plan
from noria.runtime.batch.job_plan import derived_plan, limit_note
from noria.runtime.batch.peers import ALONE
from noria.runtime.cli import main

MODEL = PlannedModel("tiny", "")
LONG = replace(CONFIG, max_position=8192)
OPEN = [RowNeed(20, None)] * 3 + [RowNeed(9, 4)]
VALUES = ["0", "1", "-1", "16", "1.5", "nan", "true", '""', '"x"', "x", "[]", "{}", "[16]", "data"]
VALUES += ["[[16,4]]", '[[16,"a"]]', '[["a",1]]', "[[nan,1]]", "{a=1}", "[{}]", "[[[]]]", "[true]"]
VALUES += ["1979-05-27", "99999999999999999999", "[16,64]", '["data"]', "chunk"]


def plan_of(rows, *overrides) -> Plan:
    return derived_plan(
        rows, find_target("cpu"), MODEL, Numbers("float32"), LONG, None, overrides, ALONE
    )


@pytest.fixture
def memory(monkeypatch):
    """Sets the bytes of the device."""
    return lambda found: monkeypatch.setattr(job_plan, "_memory_bytes", lambda target: found)


class Device:
    def __init__(self, process_index: int):
        self.process_index = process_index

    def memory_stats(self) -> dict[str, int]:
        if self.process_index != jax.process_index():
            raise RuntimeError("MemoryStats is only supported for addressable PjRt devices.")
        return {"bytes_limit": 80 * 10**9 + 7}


def test_memory_is_that_of_a_device_of_this_process():
    devices = tuple(Device(jax.process_index() + other) for other in (1, 0))
    assert job_plan._memory_bytes(Target("gpu:2", "gpu", devices, True)) == 80 * 10**9


def test_rows_go_on_to_the_models_context_where_it_fits():
    plan = plan_of(OPEN)
    assert plan.buckets.max_length == LONG.max_position
    assert plan.max_length_reason == "" and limit_note(plan, OPEN, LONG.max_position) is None


def test_a_limit_of_memory_is_said_in_the_plan_and_with_the_option_that_changes_it(memory):
    memory(40_000_000)
    plan = plan_of(OPEN)
    assert plan.buckets.decode_spans[-1] == plan.buckets.max_length < LONG.max_position
    assert "over 0.125 of the memory that the weights leave (0.0 GB" in plan.max_length_reason
    assert Plan.from_table(tomllib.loads(plan.to_toml())) == plan
    said = limit_note(plan, OPEN, LONG.max_position)
    assert said.startswith(
        f"3 rows without max_tokens: at most {plan.buckets.max_length} tokens each, prompt "
        f"included, of the model's 8192: the cache of more would take over 0.125"
    )
    longer = plan_of(OPEN, "buckets.max_length=4096")
    assert longer.buckets.max_length == 4096 and not longer.max_length_reason
    assert "of the model's 8192: so the plan or --set says" in limit_note(longer, OPEN, 8192)


def test_memory_limits_no_row_that_has_max_tokens(memory):
    memory(0)
    rows = [RowNeed(20, 4000)]
    plan = plan_of(rows)
    assert plan.buckets.max_length == 4032 and not plan.max_length_reason
    assert limit_note(plan, rows, LONG.max_position) is None


def test_what_is_expected_is_planned_where_nothing_fits(memory):
    memory(0)
    assert plan_of(OPEN).buckets.max_length == 20 + 12 + GridDefaults().unspecified_output


def keys(table, prefix=""):
    for key, value in table.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from keys(value, f"{prefix}{key}.")


KEYS = [*keys(tomllib.loads(plan_of(OPEN).to_toml()))]
KEYS += ["a", "a.b", "buckets.chunk", "buckets.span_slots", "buckets.slot_groups", "mesh.data"]
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
    bias = {"logit_bias": {"2": -100}}  # nothing else ends them
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
