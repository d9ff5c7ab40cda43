"""The adapters that a plan has room for: the table `[adapters]`.

Graphs depend on the number of adapters and on the ranks for each weight; the adapters themselves
are parameters. So one plan serves all adapters that fit into it. Knows nothing of files or devices.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...modelzoo.config_values import check_count
from ...modelzoo.errors import UserError
from ..plan_tables import PlanTable


@dataclass(frozen=True)
class AdapterGrid(PlanTable, name="adapters"):
    """The number and the ranks of the adapters that rows may use."""

    count: int
    """The number of adapters. Unit: adapters."""
    ranks: Mapping[str, int] = field(hash=False)
    """The rank of every adapted weight of a layer, such as `{"mlp.down" = 16}`. Weights that noria
    stores as one, such as `attention.qkv`, need the sum of the ranks of their parts; adapters with
    smaller ranks are padded. Unit: ranks."""

    def __post_init__(self):
        """Check the fields; ValueError names the wrong key."""
        check_count("adapters.count", self.count)
        if not isinstance(self.ranks, Mapping) or not self.ranks:
            raise UserError(
                f"adapters.ranks: expected a table with the ranks of weights, such as "
                f'"mlp.down" = 16, got {self.ranks!r}.'
            )
        for target, rank in self.ranks.items():
            check_count(f"adapters.ranks {target!r}", rank)

    def rank_of(self, parameter: str) -> int:
        """The rank of a parameter of one or several layers; 0 if it is not adapted."""
        _, _, target = parameter.partition("layers.")[2].partition(".")
        return self.ranks.get(target, 0)
