"""The facts of a plan, which are the same however its file is written.

Two files are one plan if they resolve to the same keys: defaults that are written out and the order
of tables make no difference. Does not know about jobs or bundles.
"""

import json
import tomllib
from dataclasses import replace
from typing import Any

from ...compile.plan import Plan


def plan_facts(plan: Plan) -> str:
    """The keys of a plan that decide its graphs and its answers, as JSON.

    The evidence is left out, as it changes no answer.
    """
    # not sorted: the axes of a mesh and the rules of weights have an order
    return json.dumps(plan_table(plan))


def plan_table(plan: Plan) -> dict[str, Any]:
    """The same keys as a table."""
    return tomllib.loads(replace(plan, evidence=None).to_toml())
