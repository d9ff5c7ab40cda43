"""Makes the plan of a job, or of a workload, that asks for vectors of texts, and describes it.

All lengths are known and there is no decode, so no grid is simulated. Weights are not read, and
nothing is compiled.
"""

import tomllib
from collections.abc import Sequence

from ...compile.abstract_model import model_sizes
from ...compile.expert_plan import default_experts
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.default_grid import with_overrides
from ...compile.grids.embed_grid import embed_defaults, embed_grid
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.grids.prefill_ladder import prefill_padding
from ...compile.plan import Numbers, Plan, PlannedModel
from ...compile.target_names import TargetName
from ...modelzoo.config import DecoderConfig
from ...sharding.layout import Layout
from ...sharding.legality import require
from ..checkpoint import ModelFiles
from ..checkpoint.published_numbers import override_plan
from ..console import plural
from ..errors import ConfigError
from ..files.layout_files import read_layout, split_spellings
from ..files.run_config import apply_overrides
from .option_values import numbers_of, planned_model
from .plan_options import PlanOptions
from .workload import Workload

CPU_TOKENS, ACCELERATOR_TOKENS = 2048, 16384
"""Tokens of one call for each piece into which a layout splits rows: they keep devices busy."""
ACCELERATOR_STEP = 16
"""Lengths on accelerators are multiples of this, so that arrays fill tiles."""


def embedding_plan(
    lengths: Sequence[int],
    target: str,
    model: PlannedModel,
    numbers: Numbers,
    config: DecoderConfig,
    layout: Layout | None,
    overrides: Sequence[str] = (),
) -> Plan:
    """A plan for texts of these lengths, changed by the user's overrides.

    Args:
      lengths: The number of tokens of each text.
      target: The name of the target, present or not.
      model: The model's name and fingerprint.
      numbers: The dtype and the format of weights.
      config: The model's configuration.
      layout: The layout; None for one device.
      overrides: Settings `a.b=value`.

    Raises:
      ValueError: A key of the overrides is unknown or its value is invalid.
    """
    asked = apply_overrides({"buckets": {}}, overrides).get("buckets", {})
    defaults = with_overrides(aims(target, layout), asked)
    grid = embed_grid(lengths, config.max_position, defaults)
    plan = Plan(target, model, numbers, grid, layout, default_experts(config))
    return Plan.from_table(override_plan(tomllib.loads(plan.to_toml()), overrides))


def aims(target: str, layout: Layout | None) -> GridDefaults:
    """The aims of embedding grids for a target and a layout."""
    is_cpu = TargetName.parse(target).platform == "cpu"
    step, tokens = (1, CPU_TOKENS) if is_cpu else (ACCELERATOR_STEP, ACCELERATOR_TOKENS)
    own = GridDefaults.for_layout(layout)
    return embed_defaults(own, length_step=step, tokens_per_call=tokens)


def padding_note(lengths: Sequence[int], plan: Plan, config: DecoderConfig) -> str:
    """A line on the padding of texts and on their pooling."""
    longest = plan.buckets.prefill[-1].length
    fitting = [length for length in lengths if length <= longest]
    real, computed = prefill_padding(fitting, plan.buckets.prefill)
    share = (computed - real) / computed if computed else 0.0
    return (
        f"embeddings: {plural(real, 'token')} in {plural(len(fitting), 'text')}, {computed} "
        f"computed, {share:.1%} padding; pooling {config.pooling}"
    )


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
    num_devices = TargetName.parse(options.target).num_devices
    layouts = [read_layout(name, num_devices) for name in spellings]
    layout, config = next(iter(layouts), None), files.spec.config
    numbers, model = numbers_of(options, files), planned_model(options, files)
    lengths = workload.text_lengths
    if min(lengths) > config.max_position:
        raise ConfigError(
            f"--workload {workload.name}: expected a text of at most {config.max_position} tokens, "
            f"the context of {files.name}, got {min(lengths)} and more. Shorten the texts."
        )

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
