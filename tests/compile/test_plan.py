"""The plan file: what is written is what is read, and what is not known is refused."""

import tomllib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.compile.attention_kernels import AttentionPlan
from noria.compile.bucket_grid import BucketGrid
from noria.compile.expert_plan import ExpertPlan
from noria.compile.plan import Plan, PlannedModel
from noria.compile.plan_tables import table_lines
from noria.modelzoo.moe.config import LOSSLESS, Dispatch

GRID = BucketGrid(64, ((16, 4), (48, 1)), 8, (32, 64), steps_per_call=4, score=True)
PLAN = Plan("cpu", PlannedModel('a "quoted" \\ name', "sha256:00", "float32"), GRID)


EXPERTS = ExpertPlan(LOSSLESS, Dispatch("capacity", 1.25), "drop")


def test_a_plan_says_which_kernel_was_asked_for():
    plan = replace(PLAN, attention=AttentionPlan(prefill="xla"))
    text = plan.to_toml()
    assert '[attention]\nprefill = "xla"\ndecode = "auto"' in text
    assert Plan.from_table(tomllib.loads(text)) == plan
    assert "[attention]" not in PLAN.to_toml()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ('decode = "pages"', r"\[attention\] decode: .* one of auto, splash, cudnn, xla, got"),
        ("prefill = 1", r"\[attention\] prefill: expected one of .* got 1"),
        ('chunk = "xla"', r"\[attention\]: .* unknown \['chunk'\]"),
    ],
)
def test_a_kernel_that_does_not_exist_is_refused(table, message):
    with pytest.raises(ValueError, match=message):
        Plan.from_table(tomllib.loads(PLAN.to_toml() + "[attention]\n" + table))


def test_a_plan_says_that_layers_are_scanned_where_they_are():
    plan = replace(PLAN, model=replace(PLAN.model, scan_layers=True))
    assert "scan_layers = true" in plan.to_toml()
    assert Plan.from_table(tomllib.loads(plan.to_toml())) == plan
    assert "scan_layers" not in PLAN.to_toml()


def test_whether_layers_are_scanned_is_true_or_false():
    with pytest.raises(ValueError, match=r"model\.scan_layers: expected true or false, got 1"):
        PlannedModel("model", "", "float32", 1)


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_survives_its_file(name):
    plan = replace(PLAN, model=replace(PLAN.model, source=name))
    assert Plan.from_table(tomllib.loads(plan.to_toml())) == plan
    assert tomllib.loads("\n".join(table_lines("a", {name: name}))) == {"a": {name: name}}


@given(st.text(), st.characters(categories=["Cs"]))
def test_text_that_no_file_holds_is_refused_by_its_key(name, surrogate):
    plan = replace(PLAN, model=replace(PLAN.model, source=name + surrogate))
    with pytest.raises(ValueError, match=r"model\.source: expected text .* UTF-8, got .* Rename"):
        plan.to_toml()


@pytest.mark.parametrize("experts", [None, ExpertPlan(), EXPERTS])
def test_a_plan_survives_its_file(experts):
    plan = replace(PLAN, experts=experts)
    assert Plan.from_table(tomllib.loads(plan.to_toml())) == plan


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema = 1", "schema = 2", "plan schema: expected 1, got 2"),
        ("schema = 1", "schema = true", "plan schema: expected 1, got True"),
        ('"cpu"', "8", "target: expected cpu, .* got 8"),
        ('"cpu"', '"gpus"', "target: expected cpu, .* got 'gpus'"),
        (
            "max_length = 64",
            "max_length = 64.0",
            "max_length: expected a positive integer, got 64.0",
        ),
        ("decode_slots = 8", "decode_slotz = 8", r"unknown \['decode_slotz'\]"),
        ("max_length = 64\n", "", r"missing \['max_length'\]"),
        ("[model]", "[modell]", r"unknown \['modell'\], missing \['model'\]"),
        ('dtype = "float32"', 'dtype = "float16"', "model.dtype: expected float32 or bfloat16"),
        ('"sha256:00"', "7", "model.fingerprint: expected a string, got 7"),
        ('target = "cpu"', 'target = "cpu"\nmeshes = 3', r"unknown \['meshes'\]"),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_name(old, new, message):
    text = PLAN.to_toml()
    assert old in text
    with pytest.raises(ValueError, match=message):
        Plan.from_table(tomllib.loads(text.replace(old, new)))


def test_what_is_left_out_of_the_tables_of_experts_is_without_loss():
    table = tomllib.loads('[experts.prefill]\ndispatch = "capacity"\ncapacity_factor = 2')
    expected = ExpertPlan(Dispatch("capacity", 2), LOSSLESS, "error")
    assert ExpertPlan.from_table(table["experts"]) == expected
    assert ExpertPlan.from_table({}) == ExpertPlan(LOSSLESS, LOSSLESS, "error")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('overflow = "drop"', 'overflow = "ignore"', r"\[experts\] overflow: expected one of"),
        ('overflow = "drop"', "drop = true", r"\[experts\]: .* unknown \['drop'\]"),
        ("[experts.decode]", "[experts.decod]", r"\[experts\]: .* unknown \['decod'\]"),
        ('"capacity"', '"dense"', r"\[experts.decode\] dispatch: expected one of .*'dense'"),
        ('"capacity"', '"lossless"', r"\[experts.decode\] capacity_factor: expected none"),
        ("capacity_factor = 1.25", "", r"capacity_factor: expected a number above 0, got None"),
        ("= 1.25", "= 0", r"\[experts.decode\] capacity_factor: .* above 0, got 0"),
        ("= 1.25", "= true", r"\[experts.decode\] capacity_factor: .* above 0, got True"),
        ("capacity_factor", "factor", r"\[experts.decode\]: .* unknown \['factor'\]"),
    ],
)
def test_a_wrong_table_of_experts_is_refused_by_name(old, new, message):
    text = replace(PLAN, experts=EXPERTS).to_toml()
    assert text.count(old) == 1
    with pytest.raises(ValueError, match=message):
        Plan.from_table(tomllib.loads(text.replace(old, new)))


def test_tiles_are_the_targets_and_no_plans():
    tiles = {name: EXPERTS.dispatch("decode", name).tiles for name in ("cpu", "gpu", "tpu")}
    assert tiles == {"cpu": (4, 64), "gpu": (16, 128), "tpu": (8, 128)}
    assert replace(EXPERTS.dispatch("decode", "tpu"), tiles=LOSSLESS.tiles) == EXPERTS.decode
    with pytest.raises(
        ValueError, match=r"\[experts.prefill\] tiles: expected those of the target"
    ):
        ExpertPlan(Dispatch(tiles=(2, 2)))
