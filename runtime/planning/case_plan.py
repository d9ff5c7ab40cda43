"""The plan of a case of `noria bench`: rows of one prompt length and one output length.

It is the plan that a batch job of these rows would derive, with as many rows at once as memory
holds, so that a case runs in its own shape. On a CPU each row has a slot. An accelerator has at
most as many slots as a job of many rows would get. Reads no weights.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import replace

from ...compile.expert_plan import default_experts
from ...compile.grids.default_grid import derive_grid, with_overrides
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.grids.row_shape import RowShape
from ...compile.plan import Numbers, Plan, PlannedModel
from ...compile.targets import Target
from ...sharding.layout import Layout
from ..checkpoint import ModelFiles
from ..checkpoint.published_numbers import keep_published, overridden_numbers, override_plan
from ..devices.graph_memory import device_bytes
from ..files.run_config import apply_overrides
from ..plans.plan_checks import check_plan
from .target_work import room_on_accelerator, work_of


def case_plan(
    files: ModelFiles,
    target: Target,
    dtype: str,
    layout: Layout | None,
    rows: Sequence[RowShape],
    overrides: Sequence[str],
) -> Plan:
    """The plan of the rows of a case, changed by the user's overrides, and checked.

    Raises:
      ValueError: An override is invalid, or the plan does not fit the model or the target.
    """
    config, numbers = files.spec.config, overridden_numbers(Numbers(dtype), overrides)
    defaults = GridDefaults.for_layout(layout, target.platform, numbers.cache_codes)
    slots = len(rows) if target.platform == "cpu" else defaults.max_decode_slots
    buckets = apply_overrides({}, overrides).get("buckets", {})
    defaults = with_overrides(replace(defaults, max_decode_slots=slots), buckets)
    work = work_of(config, numbers, layout, target)
    holds = room_on_accelerator(work, target, device_bytes(target), defaults)
    grid = derive_grid(rows, config.max_position, defaults, holds=holds)
    model, experts = PlannedModel(files.name, files.fingerprint()), default_experts(config)
    plan = Plan(target.name, model, Numbers(dtype), grid, layout, experts)
    plan = Plan.from_table(override_plan(tomllib.loads(plan.to_toml()), overrides))
    plan = replace(plan, numbers=keep_published(plan.numbers, files))
    check_plan(plan, files, target)
    return plan
