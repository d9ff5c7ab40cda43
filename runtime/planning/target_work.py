"""The work of a model's graphs on a target, and the room for a cache beside its weights.

Does not know about rows or files.
"""

import math
from collections.abc import Callable
from functools import partial

from ...compile.abstract_model import AbstractModel
from ...compile.attention_kernels import cache_dtype
from ...compile.grids.adapter_grid import AdapterGrid
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.grid_defaults import GridDefaults
from ...compile.plan import Numbers
from ...compile.planning.page_choice import pages_in_memory, row_bytes
from ...compile.planning.work import Work
from ...compile.targets import Target
from ...modelzoo.config import DecoderConfig
from ...sharding.layout import Layout
from ..devices.graph_memory import MEMORY_SHARE


def work_of(
    config: DecoderConfig,
    numbers: Numbers,
    layout: Layout | None,
    target: Target,
    adapters: AdapterGrid | None = None,
) -> Work:
    """The work of a model's graphs on a target."""
    placement = target.placement(layout)
    arrangement = placement.arrangement(config, cache_codes=numbers.cache_codes)
    definition = AbstractModel(config, arrangement, numbers.weight_rules, adapters)
    codes = numbers.cache_codes
    stored = cache_dtype(config, placement.platform, numbers.dtype, cache_codes=codes)
    return Work(definition, numbers.dtype, layout, stored)


def bytes_for_pages(work: Work, target: Target, memory_bytes: int, cpu_share: float) -> float:
    """The bytes beside the weights that pages may have on each device, infinite if not known.

    Args:
      work: The work of the model's graphs.
      target: The target.
      memory_bytes: The memory of a device; 0 if it is not known.
      cpu_share: The share of the memory beside the weights that pages may have on a CPU.
    """
    if not memory_bytes:
        return math.inf
    if target.platform == "cpu":
        return cpu_share * (memory_bytes - work.parameter_bytes)
    return MEMORY_SHARE * memory_bytes - work.parameter_bytes


def room_on_accelerator(
    work: Work, target: Target, memory_bytes: int, defaults: GridDefaults
) -> Callable[[int, int], bool] | None:
    """Whether an accelerator holds so many rows of a length.

    Returns:
      None for a CPU, whose derived plans have few slots, and if the memory is not known.
    """
    if target.platform == "cpu" or not memory_bytes:
        return None
    max_bytes = bytes_for_pages(work, target, memory_bytes, defaults.cpu_cache_share)
    return partial(rows_fit, work, max_bytes, defaults)


def rows_fit(
    work: Work, max_bytes: float, defaults: GridDefaults, num_rows: int, length: int
) -> bool:
    """Whether the pages of so many rows of a length take at most `max_bytes` on each device."""
    num_pages = -(-length // defaults.page)
    return num_rows * row_bytes(work, defaults.page, num_pages, defaults.chunks) <= max_bytes


def in_memory_of(
    grid: BucketGrid,
    work: Work,
    target: Target,
    max_bytes: float,
    row_tokens: int | None = None,
) -> BucketGrid | None:
    """The grid with no more pages than `max_bytes` hold; None if there is no room for one row.

    On a CPU there always is: a plan says how much memory it needs, and nobody knows what a machine
    has.
    """
    assert grid.page is not None
    if target.platform == "cpu":
        of_row = row_bytes(work, grid.page, grid.num_pages(grid.max_length), grid.chunks)
        max_bytes = max(max_bytes, (grid.slot_groups or 1) * of_row)
    return pages_in_memory(grid, work, max_bytes, row_tokens)
