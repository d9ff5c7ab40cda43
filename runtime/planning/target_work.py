"""The work of a model's graphs on a target, and the room for a cache beside its weights.

Does not know about rows or files.
"""

from collections.abc import Callable
from functools import partial

from ...compile.abstract_model import AbstractModel
from ...compile.grids.adapter_grid import AdapterGrid
from ...compile.plan import Numbers
from ...compile.planning.page_choice import row_bytes
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
    return Work(definition, numbers.dtype, layout, placement.cache_dtype(numbers.dtype))


def room_on_accelerator(
    work: Work, target: Target, memory_bytes: int
) -> Callable[[int, int], bool] | None:
    """Whether an accelerator holds weights and a cache, as a function of slots and positions.

    Returns:
      None for a CPU, whose derived plans have few slots, and if the memory is not known.
    """
    if target.platform == "cpu" or not memory_bytes:
        return None
    return partial(cache_fits, work, MEMORY_SHARE * memory_bytes - work.parameter_bytes)


def rows_fit_pages(
    work: Work,
    max_bytes: float,
    page: int,
    groups: int,
    chunks: tuple[int, ...],
    slots: int,
    length: int,
) -> bool:
    """Whether the pages of so many rows of a length take at most `max_bytes` on each device.

    Each of the equal groups of slots on different devices has pages for as many rows.
    """
    return groups * slots * row_bytes(work, page, -(-length // page), chunks) <= max_bytes


def cache_fits(work: Work, max_bytes: float, slots: int, length: int) -> bool:
    """Whether a cache takes at most `max_bytes` on each device."""
    return work.cache_bytes(slots, length) <= max_bytes
