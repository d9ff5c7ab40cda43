"""Checks that a plan, a layout and a target fit each other and a model, before anything is loaded.

Knows nothing of weights, graphs or rows. Guarantees: what passes is run as planned; what does not
is refused with the key of the plan to change.
"""

import tomllib

import jax.numpy as jnp

from ...compile.attention_kernels import AttentionChoices, choose_kernels
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.plan import Plan
from ...compile.target_names import TargetName
from ...compile.targets import Target
from ...compile.weight_rules import ALL_FLOAT, WeightRules
from ...modelzoo.config import DecoderConfig
from ...sharding.layout import Layout
from ...sharding.legality import require
from ..checkpoint import ModelFiles
from ..errors import ModelNotFound, UserError


def read_stored(text: str) -> Plan:
    """The plan that a journal or a manifest has, from the run that began the job.

    Raises:
        ValueError: Another version wrote it, with other keys or values.
    """
    try:
        return Plan.from_table(tomllib.loads(text))
    except ValueError as error:
        raise UserError(
            f"{error} The job was begun by another version of noria, which wrote this plan. "
            "Continue with that version, or begin the job again with --restart."
        ) from error


def check_plan(plan: Plan, files: ModelFiles, target: Target, dtype: str = "auto") -> None:
    """Check that a plan can run with a model, a present target and a dtype.

    Raises:
      ValueError: The plan was made for another model, target or dtype, or cannot run.
    """
    check_target(plan, target)
    check_model(plan, files)
    if dtype != "auto":
        _expect("numbers.dtype", dtype, plan.numbers.dtype, "Ask for auto to run as planned.")
    check_layout(plan.layout, files, target, plan.buckets, plan.numbers.weight_rules)
    attention_kernels(plan, files.spec.config, target)


def attention_kernels(plan: Plan, config: DecoderConfig, target: Target) -> AttentionChoices:
    """The attention kernel of each graph.

    Raises:
      ValueError: The plan asks for a kernel that cannot serve its graphs.
    """
    placement, dtype = target.placement(plan.layout), jnp.dtype(plan.numbers.dtype)
    codes = plan.numbers.cache_codes
    return choose_kernels(config, plan.buckets, placement, dtype, plan.attention, cache_codes=codes)


def check_target(plan: Plan, target: Target) -> None:
    """Check that a plan was made for the devices of a target.

    A plan for a topology fits every target with the same platform and number of devices.

    Raises:
      ValueError: The plan was made for other devices.
    """
    planned = TargetName.parse(plan.target)
    devices = target.platform, len(target.devices)
    if target.name != plan.target and (planned.platform, planned.num_devices) != devices:
        raise UserError(
            f"plan target: expected {target.name}, got {plan.target}. Use the target of the plan, "
            f"or give another plan with --plan: noria plan --target {target.name} makes one."
        )


def check_model(plan: Plan, files: ModelFiles) -> None:
    """Check that a plan was made for a model, and that its rows fit the model's context.

    Raises:
      ValueError: The plan was made for another model, or its rows are too long.
    """
    if plan.model.fingerprint:
        try:
            expected = files.fingerprint()
        except ModelNotFound as error:
            raise UserError(
                f"plan model.fingerprint: expected none, as the weights of {files.name} to compare "
                f"with cannot be found, got {plan.model.fingerprint}. Give the model with its "
                f"weights, or plan for this folder. ({error})"
            ) from None
        _expect("model.fingerprint", expected, plan.model.fingerprint, "Plan again for this model.")
    config = files.spec.config
    if not plan.buckets.embed and config.lacks_generation is not None:
        raise UserError(
            f"plan buckets.embed: expected true, as {files.name} generates and scores no tokens: "
            f"{config.lacks_generation}. Ask for embeddings."
        )
    longest = config.max_position
    if plan.buckets.max_length > longest:
        raise UserError(
            f"plan buckets.max_length: expected at most {longest}, the published context of "
            f"{files.name}, got {plan.buckets.max_length}. Plan again for shorter rows."
        )
    if plan.experts is not None and config.moe is None:
        raise UserError(
            f"plan [experts]: expected no such table, as {files.name} is a dense model, got one. "
            f"Remove it."
        )


def check_layout(
    layout: Layout | None,
    files: ModelFiles,
    target: Target,
    grid: BucketGrid | None = None,
    weight_rules: WeightRules = ALL_FLOAT,
) -> None:
    """Check that a layout is legal for a model, a target, a grid and the formats of weights.

    Raises:
      ValueError: The layout is illegal, or is missing for several devices; the error lists all
        findings. Or a weight cannot have its format.
    """
    num_devices = len(target.devices)
    if layout is not None or weight_rules != ALL_FLOAT:
        from ...compile.abstract_model import model_sizes

        sizes = model_sizes(files.spec.config, num_devices, grid, weight_rules)
        if layout is not None:
            require(layout, sizes)
    if layout is None and num_devices > 1:
        raise UserError(
            f"target {target.name}: expected a layout for its {num_devices} devices, got none. "
            f"Give a layout, as with --layout data-parallel@data={num_devices}, or in the plan's "
            f"table [layout]."
        )
    if layout is None and grid is not None and grid.slot_groups not in (None, 1):
        raise UserError(
            f"plan buckets.slot_groups: without a layout, expected 1, as all slots are on one "
            f"device, got {grid.slot_groups}. Change it, or give the plan its layout back."
        )


def _expect(key: str, expected: str, got: str, remedy: str) -> None:
    if got != expected:
        raise UserError(f"plan {key}: expected {expected}, got {got}. {remedy}")
