"""XLA options for the graphs of a plan: the defaults of a platform, and the plan's own options."""

import math
from collections.abc import Mapping
from typing import Any

from ..modelzoo.errors import UserError
from .graphs.graph_kinds import GRAPH_KINDS
from .plan_tables import check_keys

CompilerOptions = Mapping[str, Mapping[str, str | int | float | bool]]
"""Values by `GraphKind.options`, then by name of the option."""
NO_OPTIONS: CompilerOptions = {}
KINDS = tuple(dict.fromkeys(kind.options for kind in GRAPH_KINDS.values() if kind.options))
PLATFORM_OPTIONS: Mapping[str, CompilerOptions] = {
    "tpu": {"decode": {"xla_tpu_msa_inefficient_use_to_copy_ratio": 0.55}},
    "cpu": {"embed": {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_REDUCE"}},
}
"""Default options of each platform, used unless a plan sets them.

On TPU a ratio above 0.5 (XLA's default) keeps the cache in main memory. A decode step reads a
segment once and writes a row of it; at 0.5 XLA copies the segment onto the chip and back for that.

On the CPU, the option for embedding graphs leaves reductions to the library YNNPACK, and products
to Eigen, which is faster for products of float32 arrays with many rows. The option is used only if
all products are of float32.
"""

GPU_OPTIONS_FOR_CODED_CACHES: Mapping[str, bool | int] = {"xla_gpu_dot_merger_threshold_mb": 0}
"""Default options of GPUs for a cache in codes.

Otherwise XLA joins the products of the same queries with the keys of two segments to one product,
and writes the keys in a wider dtype for it.
"""
GPU_OPTIONS_FOR_GROUPS: Mapping[str, bool | int] = {
    "xla_gpu_dot_merger_threshold_mb": 0,
    "xla_gpu_experimental_enable_subchannel_dequantisation_fusion": True,
    "xla_gpu_experimental_force_split_k": 1,
}
"""Default options of GPUs if a weight has groups: XLA then dequantises it within the product.

It could not do so if it joined products, or split the inputs of a product.
"""


def read_options(table: Any) -> CompilerOptions:
    """Read the table `[compiler]` of a plan.

    Options are sorted, so plans that differ only in the order of options are equal.

    Raises:
      ValueError: A kind of graph is unknown, or a value has a wrong type.
    """
    check_keys("[compiler]", table, set(), set(KINDS))
    for kind, options in table.items():
        if not isinstance(options, Mapping):
            raise UserError(f"[compiler.{kind}]: expected a table, got {options!r}.")
        for name, value in options.items():
            is_finite = not isinstance(value, float) or math.isfinite(value)
            if not is_finite or not isinstance(value, str | int | float):
                raise UserError(
                    f"compiler.{kind}.{name}: expected a string, a finite number, true or false, "
                    f"got {value!r}."
                )
    return {kind: dict(sorted(table[kind].items())) for kind in KINDS if table.get(kind)}


def with_defaults(
    options: CompilerOptions,
    platform: str,
    *,
    is_float32: bool,
    has_groups: bool = False,
    has_coded_cache: bool = False,
) -> CompilerOptions:
    """Options completed with the defaults of a platform.

    Args:
      options: The options of the plan.
      platform: The platform.
      is_float32: Whether all products are of float32 arrays.
      has_groups: Whether a weight has groups.
      has_coded_cache: Whether keys and values are stored in codes.
    """
    defaults = PLATFORM_OPTIONS.get(platform, NO_OPTIONS)
    if platform == "cpu" and not is_float32:
        defaults = NO_OPTIONS
    if platform == "gpu":
        of_groups = GPU_OPTIONS_FOR_GROUPS if has_groups else {}
        of_cache = GPU_OPTIONS_FOR_CODED_CACHES if has_coded_cache else {}
        of_models = {kind.options for kind in GRAPH_KINDS.values() if kind.call and kind.options}
        defaults = {kind: {**of_groups, **of_cache} for kind in of_models}
    merged = {kind: {**defaults.get(kind, {}), **options.get(kind, {})} for kind in KINDS}
    return {kind: dict(sorted(values.items())) for kind, values in merged.items() if values}
