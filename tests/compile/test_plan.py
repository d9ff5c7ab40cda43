"""The plan file: a written plan is read back unchanged, and unknown keys are refused."""

import copy
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.compile.attention_kernels import AttentionPlan
from noria.compile.expert_plan import ExpertPlan
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid
from noria.compile.plan import Numbers, Plan, PlannedModel, published_format, published_table
from noria.compile.plan_evidence import PlanEvidence
from noria.compile.plan_tables import PlanTable, table_lines
from noria.modelzoo.moe_config import LOSSLESS, Dispatch, Tiles
from noria.modelzoo.weights.weight_formats import WeightFormat

ROOT = Path(__file__).resolve().parents[2]
GRID = BucketGrid(64, ((16, 4), (48, 1)), 8, page=16, steps_per_call=4, score=True)
PLAN = Plan("cpu", PlannedModel('a "quoted" \\ name', "sha256:00"), Numbers("float32"), GRID)
EXPERTS = ExpertPlan(LOSSLESS, Dispatch("capacity", 1.25), "drop")


@pytest.mark.parametrize("owner", [Plan, BucketGrid])
def test_every_field_that_is_a_table_is_listed_under_its_name(owner):
    kinds = {
        name: kind
        for name, hint in get_type_hints(owner).items()
        for kind in get_args(hint) or [hint]
        if isinstance(kind, type) and issubclass(kind, PlanTable)
    }
    assert kinds == {kind.NAME: kind for kind in owner.TABLES}


def test_the_keys_that_the_page_calls_required_are_the_ones_that_a_file_must_have():
    """The page has a default for each other key of these tables, or says that there is none."""
    text = (ROOT / "docs/plan_file.md").read_text("utf-8").partition("### `[prefixes]`")[0]
    parts = re.split(r"^### `\[(\w+)\]`$", text, flags=re.MULTILINE)
    of_tables = dict(zip(["", *parts[1::2]], parts[0::2], strict=True))
    row = re.compile(r"^\| `(\w+)` \| [^|]* \| [^|]* \| ([^|]*) \| ", re.MULTILINE)
    evidence = PlanEvidence("published peaks", 1.0, 2.0, 3.0, 4.0)
    whole = tomllib.loads(replace(PLAN, evidence=evidence).to_toml())
    required = set()
    for name, rows in of_tables.items():
        for key, default in row.findall(rows):
            table = copy.deepcopy(whole)
            (table[name] if name else table).pop(key, None)
            if default == "required":
                required.add(key)
                with pytest.raises(ValueError, match=f"missing .*{key}"):
                    Plan.from_table(table)
            else:
                Plan.from_table(table)
    assert {"schema", "target", "source", "dtype", "max_length", "costs"} <= required


def test_a_plan_says_which_kernel_was_asked_for():
    plan = replace(PLAN, attention=AttentionPlan(prefill="xla"))
    text = plan.to_toml()
    assert '[attention]\nprefill = "xla"\ndecode = "auto"' in text
    assert Plan.from_table(tomllib.loads(text)) == plan
    assert "[attention]" not in PLAN.to_toml()


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            'decode = "pages"',
            r"decode: .* one of auto, splash, cudnn, numba, paged, xla, got",
        ),
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


def test_the_evidence_of_a_plan_survives_its_file_with_four_digits():
    evidence = PlanEvidence("measured h200, jax 0.11.2", 13.123456, 83.9, 6988.4321, 128768.5, 0.25)
    plan = replace(PLAN, evidence=evidence)
    read = Plan.from_table(tomllib.loads(plan.to_toml()))
    rounded = PlanEvidence("measured h200, jax 0.11.2", 13.12, 83.9, 6988, 128800, 0.25)
    assert read == replace(PLAN, evidence=rounded)
    unpriced = replace(plan, evidence=replace(rounded, price=None))
    assert Plan.from_table(tomllib.loads(unpriced.to_toml())) == unpriced
    assert "price" not in unpriced.to_toml()


def test_wrong_evidence_is_refused_by_name():
    evidence = PlanEvidence("published peaks", 1.0, 2.0, 3.0, 4.0)
    text = replace(PLAN, evidence=evidence).to_toml()
    for old, new, message in (
        ('costs = "published peaks"', "costs = 3", r"\[evidence\] costs: expected a string, got 3"),
        ("run_seconds = 2.0", "run_seconds = -1", r"\[evidence\] run_seconds: expected a number"),
        ("rows_per_hour = 4.0", "", r"\[evidence\]: expected .* missing \['rows_per_hour'\]"),
    ):
        assert old in text
        with pytest.raises(ValueError, match=message):
            Plan.from_table(tomllib.loads(text.replace(old, new)))


def test_formats_of_weights_survive_their_file():
    rules = {"head.table": {"weights": "int8"}, 'a "b"': {"weights": "int4", "group": 32}}
    plan = replace(PLAN, numbers=Numbers("bfloat16", "int4", 64, rules, "int8"))
    text = plan.to_toml()
    assert '[numbers]\ndtype = "bfloat16"\nweights = "int4"\ngroup = 64\n' in text
    assert Plan.from_table(tomllib.loads(text)) == plan
    assert "weights" not in PLAN.to_toml()


PUBLISHED = {
    "layers.*.mlp.down": {"codes": "uint4", "group": 32, "scales": "float16", "offsets": True},
    "layers.0.attention.qkv": {"codes": "float8_e4m3fn", "scales": "float32"},
}


def test_published_formats_survive_their_file_and_are_the_formats_of_weights():
    plan = replace(PLAN, numbers=Numbers("bfloat16", "as_published", published=PUBLISHED))
    assert Plan.from_table(tomllib.loads(plan.to_toml())) == plan
    assert plan.numbers.weight_rules.published == (
        ("layers.*.mlp.down", WeightFormat("uint4", 32, "float16", has_offsets=True)),
        ("layers.0.attention.qkv", WeightFormat("float8_e4m3fn", 0, "float32")),
    )
    for _, form in plan.numbers.weight_rules.published:
        assert published_format(published_table(form)) == form


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "int8", "published": PUBLISHED}, "expected none, as weights is 'int8', got 2"),
        ({"published": {"a": {"codes": "int4"}}}, r"'a': .* missing \['scales'\]"),
        ({"published": {"a": {"codes": "int3", "scales": "float32"}}}, "'a'.codes: .* got 'int3'"),
        ({"published": {"a": {"codes": "int4", "scales": "int8"}}}, "'a'.scales: .* got 'int8'"),
        (
            {"published": {"a": {"codes": "int4", "scales": "float16", "order": 1}}},
            "'a'.order: expected true or false, got 1",
        ),
        ({"group": 32}, "numbers.group: expected 0, as published weights have their own groups"),
        ({"published": 1}, "numbers.published: expected a table, got 1"),
    ],
)
def test_published_formats_that_no_checkpoint_has_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        Numbers(**{"dtype": "float32", "weights": "as_published"} | options)


def test_a_plan_without_the_formats_of_its_checkpoint_has_no_weights():
    with pytest.raises(ValueError, match=r"numbers\.published: expected the formats of the check"):
        Numbers("float32", "as_published").weight_rules  # noqa: B018


def test_options_of_the_compiler_survive_their_file_in_an_order_of_their_own():
    table = tomllib.loads(PLAN.to_toml())
    given = {"fork": {}, "decode": {"xla_b": 1e-07, "xla_a": True}, "score": {"xla_c": "d e"}}
    plan = Plan.from_table(table | {"compiler": given})
    text = plan.to_toml()
    assert '[compiler.score]\nxla_c = "d e"\n' in text
    assert "[compiler.decode]\nxla_a = true\nxla_b = 1e-07\n" in text
    assert "fork" not in text
    assert Plan.from_table(tomllib.loads(text)) == plan
    turned = {kind: dict(reversed(given[kind].items())) for kind in reversed(given)}
    assert Plan.from_table(table | {"compiler": turned}).to_toml() == text


def test_a_plan_has_the_options_that_were_set_alone():
    plan = replace(PLAN, target="tpu:v5e:2x4", compiler={})
    assert "[compiler" not in plan.to_toml()
    assert Plan.from_table(tomllib.loads(plan.to_toml())) == plan


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("compiler = 1", r"\[compiler\]: expected a table, got 1"),
        ("[compiler.chunk]", r"\[compiler\]: expected the keys .* unknown \['chunk'\]"),
        ("[compiler]\ndecode = 1", r"\[compiler.decode\]: expected a table, got 1"),
        ("[compiler.decode]\nx = [1]", r"compiler.decode.x: expected a string, .* got \[1\]"),
        ("[compiler.decode]\nx = nan", r"compiler.decode.x: .* finite number, .* got nan"),
        ("[compiler.decode]\nx.y = 1", r"compiler.decode.x: expected .* got {'y': 1}"),
    ],
)
def test_options_that_no_compiler_could_take_are_refused(compiler, message):
    with pytest.raises(ValueError, match=message):
        Plan.from_table(tomllib.loads(PLAN.to_toml()) | tomllib.loads(compiler))


def test_options_for_graphs_that_a_plan_does_not_have_are_refused():
    with pytest.raises(ValueError, match=r"options for graphs that the plan has, got \['score'\]"):
        replace(PLAN, buckets=replace(GRID, score=False), compiler={"score": {"x": 1}})


def test_whether_layers_are_scanned_is_true_or_false():
    with pytest.raises(ValueError, match=r"model\.scan_layers: expected true or false, got 1"):
        PlannedModel("model", "", 1)


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


def test_prefixes_are_refused_with_experts_of_a_fixed_capacity_in_prefill():
    prefixes = PrefixGrid(2, 4, 16, (PlannedPrefix(16, "0" * 16),))
    grid = BucketGrid(32, ((32, 1, 16),), 4, page=16, prefixes=prefixes)
    experts = ExpertPlan(prefill=Dispatch("capacity", 2.0))
    with pytest.raises(ValueError, match=r"\[prefixes\]: expected none with experts of a fixed"):
        replace(PLAN, buckets=grid, compiler={}, experts=experts)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema = 3", "schema = 4", "plan schema: expected 3, got 4. Plan again"),
        ("schema = 3", "schema = true", "plan schema: expected 3, got True"),
        ("schema = 3", "schema = 3.0", "plan schema: expected 3, got 3.0"),
        ("schema = 3\n", "", r"missing \['schema'\]"),
        ("schema = 3", "schema = 2", "plan schema: expected 3, got 2. Plan again"),
        ('dtype = "float32"', "", r"\[numbers\]: .* missing \['dtype'\]"),
        (
            "[buckets]",
            "cache = 8\n[buckets]",
            "numbers.cache: expected one of float, int8, float8, int4, ",
        ),
        ("[buckets]", 'activations = "int4"\n[buckets]', "numbers.activations: expected one of fl"),
        (
            "[buckets]",
            'activations = "int8"\n[buckets]',
            "numbers.activations: with 'int8', expected weights in int8, got float",
        ),
        (
            "[buckets]",
            'weights = "int2"\n[buckets]',
            "weights: expected one of float, int8, float8, int4",
        ),
        (
            "[buckets]",
            'weights = "float8"\ngroup = 64\n[buckets]',
            "group: expected 0, as float8 weights have one scale",
        ),
        ("[buckets]", "group = 64\n[buckets]", "numbers.group: expected 0, as float weights"),
        ("[buckets]", 'weights = "int4"\ngroup = 1\n[buckets]', "group: .* at least 2 .* got 1"),
        ("[buckets]", 'rules = "int8"\n[buckets]', "numbers.rules: expected a table, got 'int8'"),
        (
            "[buckets]",
            '[numbers.rules]\n"*.down" = {group = 8}\n[buckets]',
            r"numbers.rules '\*.down': expected .* missing \['weights'\]",
        ),
        ("[buckets]", "[adapters]\n[buckets]", r"\[adapters\]: .* missing \['count', 'ranks'\]"),
        (
            "[buckets]",
            '[adapters]\ncount = 2\nranks = {"mlp.down" = 0}\n[buckets]',
            "adapters.ranks 'mlp.down': expected a positive integer, got 0",
        ),
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
        ('dtype = "float32"', 'dtype = "float16"', "numbers.dtype: expected float32 or bfloat16"),
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


@pytest.mark.parametrize("decode", ["capacity", {"dispatch": "capacity", "capacity_factor": 2}])
def test_what_is_no_dispatch_is_refused_by_its_phase(decode):
    with pytest.raises(ValueError, match=r"^\[experts.decode\]: expected a Dispatch such as"):
        ExpertPlan(decode=decode)


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
    tiles = {name: EXPERTS.dispatch("decode", name).tiles[:2] for name in ("cpu", "gpu", "tpu")}
    assert tiles == {"cpu": (4, 64), "gpu": (16, 128), "tpu": (64, 256)}
    assert replace(EXPERTS.dispatch("decode", "tpu"), tiles=LOSSLESS.tiles) == EXPERTS.decode
    of_v5p = EXPERTS.dispatch("decode", "tpu", "v5p")
    assert [of_v5p.tile(128 * n, 128) for n in (4, 16, 500)] == [16, 32, 256], "twice the mean load"
    with pytest.raises(ValueError, match=r"\[experts.prefill\] tiles: expected the target's tiles"):
        ExpertPlan(Dispatch(tiles=Tiles(2, 2)))


@pytest.mark.parametrize(
    ("phase", "experts"),
    [("decode", EXPERTS), ("prefill", ExpertPlan(Dispatch("capacity", 1.25)))],
)
def test_a_fixed_capacity_of_experts_needs_pages_for_the_longest_rows_in_all_slots(phase, experts):
    needed = GRID.decode_slots * 4
    grid = replace(GRID, pages=needed - 1)
    message = (
        rf"\[experts.{phase}\]: expected lossless dispatch, or at least {needed} buckets.pages, "
        rf"got a capacity_factor of 1.25 and {needed - 1} pages"
    )
    with pytest.raises(ValueError, match=message):
        replace(PLAN, buckets=grid, experts=experts)
    enough = replace(grid, pages=needed)
    assert replace(PLAN, buckets=enough, experts=experts).buckets.pages == needed


def test_a_plan_with_pages_is_read_as_it_is_written():
    plan = replace(PLAN, buckets=replace(GRID, pages=8))
    assert "pages = 8\npage = 16" in plan.to_toml()
    assert Plan.from_table(tomllib.loads(plan.to_toml())) == plan
