"""The table of graph kinds: programs depend on the keys of a plan that their kinds read alone."""

import tomllib
from dataclasses import fields, replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from alike import changed
from tiny import CONFIG

from noria.compile.abstract_model import AbstractModel
from noria.compile.attention_kernels import AttentionPlan
from noria.compile.build import GraphSpec, plan_graphs
from noria.compile.compiler_options import KINDS
from noria.compile.expert_plan import LOSSLESS_EXPERTS, ExpertPlan
from noria.compile.graphs.graph_kinds import GRAPH_KINDS, GraphKey, graph_keys, read_values
from noria.compile.grids.adapter_grid import AdapterGrid
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefix_grid import PrefixGrid
from noria.compile.grids.structured_grid import StructuredGrid
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.compile.plan_evidence import PlanEvidence
from noria.compile.targets import find_target
from noria.sharding.layout import PHASES, Layout

ONE_LAYER = changed(CONFIG, windows=(None,))
CHUNKS = BucketGrid(
    max_length=32,
    prefill=((32, 2, 8),),
    decode_slots=4,
    page=8,
    steps_per_call=4,
    score=True,
    chunks_per_decode=3,
)
PLAN = Plan("cpu", PlannedModel("tiny", ""), Numbers("float32"), CHUNKS)
WHOLE = BucketGrid(32, ((8, 2), (32, 2)), 4, page=8, steps_per_call=4)
LONGER = BucketGrid(48, WHOLE.prefill, 4, pages=16, page=8, steps_per_call=4)
SHARED = PrefixGrid(groups=2, rows=3, length=16, shared=((9, "0" * 16),))
FORMS = StructuredGrid(10, 5, 4, 8, 6, ("sha256:" + "a" * 64,))
MESH = {"name": "two", "mesh": {"tensor": 2}, "rules": {"mlp": "tensor", "vocab": "tensor"}}
PREFIXES = replace(PLAN, buckets=replace(CHUNKS, prefixes=SHARED))
STRUCTURED = replace(PLAN, buckets=replace(WHOLE, structured=FORMS))
ADAPTED = replace(PLAN, buckets=replace(WHOLE, adapters=AdapterGrid(2, {"mlp.down": 4})))
LAID_OUT = replace(PLAN, target="cpu:2", buckets=WHOLE, layout=Layout.from_table(MESH))
XLA = replace(PLAN, attention=AttentionPlan(decode="xla"))
EXPERTS = replace(PLAN, buckets=WHOLE, experts=ExpertPlan())

PROMPTS = {"prefill", "score"}
MODEL = PROMPTS | {"decode"}
EVERY = {"prefill", "score", "decode", "fork", "empty state"}


def buckets(plan: Plan, **values: object) -> Plan:
    return replace(plan, buckets=replace(plan.buckets, **values))


def numbers(**values: str) -> Plan:
    return replace(PLAN, numbers=replace(PLAN.numbers, **values))


def prefixes(**values: object) -> Plan:
    return buckets(PREFIXES, prefixes=replace(SHARED, **values))


def laid_out(**values: object) -> Plan:
    return replace(LAID_OUT, layout=Layout.from_table(MESH | values))


CHANGES = {
    "model.source": (PLAN, replace(PLAN, model=PlannedModel("other", "sha256:1")), set()),
    "max_length_reason": (PLAN, replace(PLAN, max_length_reason="x"), set()),
    "chunks_per_decode": (PLAN, buckets(PLAN, chunks_per_decode=9), set()),
    "score": (PLAN, buckets(PLAN, score=False), set()),
    "slot_groups": (PLAN, buckets(PLAN, slot_groups=2), set()),
    "a short bucket": (EXPERTS, buckets(EXPERTS, prefill=WHOLE.prefill[1:]), set()),
    "a long bucket": (EXPERTS, buckets(EXPERTS, prefill=WHOLE.prefill[:1]), set()),
    "steps_per_call": (PLAN, buckets(PLAN, steps_per_call=5), {"decode"}),
    "decode_slots": (EXPERTS, buckets(EXPERTS, decode_slots=6), EVERY),
    "max_length": (EXPERTS, replace(EXPERTS, buckets=LONGER), EVERY),
    "pages": (PLAN, buckets(PLAN, pages=17), EVERY),
    "page": (PLAN, buckets(PLAN, page=16), EVERY),
    "row_tokens": (PLAN, buckets(PLAN, row_tokens=8), EVERY),
    "scan_layers": (PLAN, replace(PLAN, model=PlannedModel("tiny", "", True)), EVERY),
    "dtype": (PLAN, numbers(dtype="bfloat16"), EVERY),
    "weights": (PLAN, numbers(weights="int8"), MODEL),
    "cache": (PLAN, numbers(cache="int8"), EVERY),
    "attention": (XLA, replace(XLA, attention=AttentionPlan("xla", "xla")), PROMPTS),
    "overflow": (EXPERTS, replace(EXPERTS, experts=ExpertPlan(overflow="drop")), set()),
    "compiler": (PLAN, replace(PLAN, compiler={"fork": {"a": 1}}), {"fork"}),
    "prefixes.shared": (PREFIXES, prefixes(shared=((12, "1" * 16),)), set()),
    "prefixes.groups": (PREFIXES, prefixes(groups=4), {"decode"}),
    "prefixes.rows": (PREFIXES, prefixes(rows=4), {"decode"}),
    "prefixes.length": (PREFIXES, prefixes(length=24), {"decode"}),
    "[structured]": (EXPERTS, buckets(EXPERTS, structured=FORMS), EVERY),
    "states": (STRUCTURED, buckets(STRUCTURED, structured=replace(FORMS, states=11)), {"decode"}),
    "[adapters]": (EXPERTS, buckets(EXPERTS, adapters=ADAPTED.buckets.adapters), EVERY),
    "ranks": (ADAPTED, buckets(ADAPTED, adapters=AdapterGrid(2, {"mlp.down": 8})), MODEL),
    "layout": (LAID_OUT, laid_out(name="other", max_replicated=0.5), set()),
    "prefill.rules": (LAID_OUT, laid_out(prefill={"rules": {"mlp": ""}}), PROMPTS),
    "decode.rules": (LAID_OUT, laid_out(decode={"rules": {"mlp": ""}}), EVERY),
    "rules": (LAID_OUT, laid_out(rules={"vocab": "tensor"}), EVERY),
}
"""Two plans, and the kinds of which every graph that both have depends on the difference."""


@cache
def graphs(toml: str) -> dict[GraphKey, GraphSpec]:
    """The graphs of a plan."""
    plan = Plan.from_table(tomllib.loads(toml))
    placement = find_target(plan.target).placement(plan.layout)
    options = plan.model.scan_layers, plan.numbers.cache_codes
    arrangement = placement.arrangement(ONE_LAYER, *options)
    weight_rules, adapters = plan.numbers.weight_rules, plan.buckets.adapters
    model = AbstractModel(ONE_LAYER, arrangement, weight_rules, adapters)
    planned = plan_graphs(
        model,
        plan.buckets,
        placement,
        jnp.dtype(plan.numbers.dtype),
        plan.experts or LOSSLESS_EXPERTS,
        plan.attention,
        plan.compiler,
    )
    return {graph.key: graph for graph in planned}


@cache
def program(toml: str, key: GraphKey) -> tuple[str, object]:
    """The lowered program of a graph, and the options of its compiler."""
    graph = graphs(toml)[key]
    function = jax.jit(graph.body, donate_argnums=graph.donated, out_shardings=graph.results)
    return function.lower(*graph.arguments).as_text(), graph.options


@pytest.mark.parametrize(("plan", "other", "kinds"), CHANGES.values(), ids=CHANGES)
def test_a_key_belongs_to_the_kinds_whose_programs_read_it(plan, other, kinds):
    ours, theirs = plan.to_toml(), other.to_toml()
    keys = set(graph_keys(plan.buckets)) & set(graph_keys(other.buckets))
    values = [
        {key: read_values(tomllib.loads(toml), key) for key in keys} for toml in (ours, theirs)
    ]
    changed = {key for key in keys if values[0][key] != values[1][key]}
    assert changed == {key for key in keys if key.kind in kinds}
    for key in keys - changed:
        assert program(ours, key) == program(theirs, key), str(key)


NO_PROGRAM = {
    "schema", "max_length_reason", "evidence", "layout", "max_replicated", "model.source",
    "model.fingerprint", "buckets.score", "buckets.embed", "buckets.chunks_per_decode",
    "buckets.slot_groups", "buckets.prefill", "prefixes.shared", "experts.overflow",
}  # fmt: skip
"""The keys that decide which graphs there are, what the host does, or nothing."""


def test_every_key_of_a_plan_is_read_by_a_kind_or_by_no_program():
    kinds = {*Plan.TABLES, *BucketGrid.TABLES} - {PlanEvidence}
    tables = {kind.NAME: kind for kind in kinds}
    keys = {f"{table}.{key.name}" for table, kind in tables.items() for key in fields(kind)}
    keys -= {f"buckets.{table}" for table in tables}
    keys |= {"schema", "buckets.chunk", "layout", "max_replicated", "mesh", "rules"}
    keys |= {f"{phase}.rules" for phase in PHASES} | {f"compiler.{kind}" for kind in KINDS}
    keys |= {key.name for key in fields(Plan)} - tables.keys() - {"layout", "compiler"}
    read = {path for kind in GRAPH_KINDS.values() for path in kind.reads}
    assert read <= keys | tables.keys()
    assert {key for key in keys if not {key, key.partition(".")[0]} & read} == NO_PROGRAM
