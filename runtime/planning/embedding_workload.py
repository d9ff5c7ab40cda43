"""Makes the plan of a workload that asks for vectors of texts: the plan that `noria batch` derives.

All lengths are known and there is no decode, so no grid is simulated. Weights are not read, and
nothing is compiled.
"""

from ...compile.abstract_model import model_sizes
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.plan import Plan
from ...compile.target_names import TargetName
from ...sharding.layout import Layout
from ...sharding.legality import require
from ..checkpoint import ModelFiles
from ..console import plural
from ..errors import ConfigError
from ..files.layout_files import read_layout_table, split_spellings
from .embedding_plan import embedding_plan, padding_note
from .option_values import numbers_of, planned_model
from .plan_options import PlanOptions
from .workload import Workload


def plan_texts(options: PlanOptions, files: ModelFiles, workload: Workload) -> Plan:
    """The plan of a workload with texts.

    Raises:
      ConfigError: Several layouts are given, or no text fits the model.
      IllegalLayout: The layout does not fit the model or the plan.
    """
    spellings = split_spellings(options.layout or "")
    if len(spellings) > 1:
        raise ConfigError(
            f"--layout: expected at most one for vectors of texts, as layouts are compared by "
            f"prefill and decode, got {', '.join(spellings)}. Choose one."
        )
    layouts = [Layout.from_table(read_layout_table(name), name) for name in spellings]
    layout, config = next(iter(layouts), None), files.spec.config
    numbers, model = numbers_of(options, files), planned_model(options, files)
    lengths = workload.text_lengths
    if min(lengths) > config.max_position:
        raise ConfigError(
            f"--workload {workload.name}: expected a text of at most {config.max_position} tokens, "
            f"the context of {files.name}, got {min(lengths)} and more. Shorten the texts."
        )
    num_devices = TargetName.parse(options.target).num_devices

    def check(grid: BucketGrid | None) -> None:
        if layout is not None:
            require(layout, model_sizes(config, num_devices, grid, numbers.weight_rules))

    # the lengths of a plan follow from a layout that is legal
    check(None)
    plan = embedding_plan(lengths, options.target, model, numbers, config, layout)
    check(plan.buckets)
    return plan


def text_summary(plan: Plan, files: ModelFiles, workload: Workload) -> str:
    """The summary of such a plan for the terminal."""
    refused = f", {plural(workload.num_refused, 'row')} refused" * bool(workload.num_refused)
    num_too_long = sum(n > plan.buckets.max_length for n in workload.text_lengths)
    refused += f", {plural(num_too_long, 'text')} too long for the model" * bool(num_too_long)
    graphs = ", ".join(f"{bucket.length}x{bucket.batch}" for bucket in plan.buckets.prefill)
    return "\n".join(
        [
            f"workload   {workload.name}: {plural(len(workload.text_lengths), 'text')}{refused}",
            f"target     {plan.target}",
            f"graphs     {graphs} (tokens x texts)",
            padding_note(workload.text_lengths, plan, files.spec.config),
        ]
    )
