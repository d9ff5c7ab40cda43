"""Makes the plan of a job that embeds texts, and describes it.

Does not know about files.
"""

import tomllib
from collections.abc import Sequence

from ...compile.expert_plan import default_experts
from ...compile.grids.default_grid import with_overrides
from ...compile.grids.embed_grid import embed_defaults, embed_grid
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.grids.prefill_ladder import prefill_padding
from ...compile.plan import Numbers, Plan, PlannedModel
from ...compile.target_names import TargetName
from ...modelzoo.config import DecoderConfig
from ...sharding.layout import Layout
from ..checkpoint.published_numbers import override_plan
from ..console import plural
from ..files.run_config import apply_overrides

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
