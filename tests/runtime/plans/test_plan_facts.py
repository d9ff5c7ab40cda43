"""Facts of plans: files that resolve to one plan have equal facts."""

import tomllib
from dataclasses import replace

from noria.compile.plan import Plan
from noria.compile.plan_evidence import PlanEvidence
from noria.runtime.plans.plan_facts import plan_facts

SHORT = """\
schema = 3
target = "cpu:8"

[model]
source = "m"
fingerprint = ""

[numbers]
dtype = "float32"

[buckets]
max_length = 64
prefill = [[16, 4]]
decode_slots = 8
slot_groups = 2

[mesh]
data = 2
tensor = 4

[rules]
batch = "data"
mlp = "tensor"
"""


def facts(text: str) -> str:
    return plan_facts(Plan.from_table(tomllib.loads(text)))


def test_defaults_that_are_written_out_are_no_difference():
    written = Plan.from_table(tomllib.loads(SHORT)).to_toml()
    assert "max_replicated = 0.05" in written and "max_replicated" not in SHORT
    assert facts(written) == facts(SHORT)


def test_the_evidence_is_no_difference():
    plan = Plan.from_table(tomllib.loads(SHORT))
    predicted = replace(plan, evidence=PlanEvidence("published peaks", 1.0, 2.0, 3.0, 4.0))
    assert plan_facts(predicted) == plan_facts(plan)


def test_a_value_and_the_order_of_a_mesh_are_differences():
    assert facts(SHORT.replace("slots = 8", "slots = 4")) != facts(SHORT)
    swapped = SHORT.replace("data = 2\ntensor = 4", "tensor = 4\ndata = 2")
    assert facts(swapped) != facts(SHORT)
