"""The call of a model as its sparse layers see it, and their reports of the use of experts.

A report counts load, rows of products and dropped choices.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ..moe_config import LOSSLESS, Dispatch


class ExpertUse(NamedTuple):
    """The use of experts in one sparse layer, by shard of the tokens (S).

    For several layers, the first axis of each array is layers.
    """

    load_SE: jax.Array
    """The number of choices of each expert."""
    rows_SE: jax.Array
    """The number of rows in the products of each expert, padding included."""
    dropped_SE: jax.Array
    """The number of dropped choices of each expert."""


class ExpertReport(NamedTuple):
    """The report of all sparse layers of a call."""

    use: ExpertUse
    """The use of experts, with layers as first axis."""
    num_dropped_B: jax.Array
    """The number of dropped choices of the tokens of each row, in all layers."""


def rows_of_tiles(load_E: jax.Array, tile: int) -> jax.Array:
    """The rows of the whole tiles that a load needs."""
    return (load_E + tile - 1) // tile * tile


@dataclass
class ExpertCall:
    """The inputs of a call that all sparse layers share, and the reports of these layers."""

    is_token_BT: jax.Array
    """True for tokens; padding and dummy rows take no expert."""
    dispatch: Dispatch = LOSSLESS
    layer: jax.Array | None = None
    """The index of the running layer in weights stacked over layers; None outside a scan."""
    uses: list[ExpertUse] = field(default_factory=list)
    """Reports of layers in order, each with layers as first axis."""
    num_dropped_BT: jax.Array | int = 0
    """The number of dropped choices of each token, in all layers so far."""

    def use(self) -> ExpertUse | None:
        """The use of experts in all sparse layers so far; None without any."""
        if not self.uses:
            return None
        with jax.named_scope("expert_use"):
            return jax.tree.map(lambda *layers: jnp.concatenate(layers), *self.uses)

    def add(self, use: ExpertUse, num_dropped_BT: jax.Array) -> None:
        """Add the report of the next layers."""
        self.uses.append(use)
        self.num_dropped_BT = self.num_dropped_BT + num_dropped_BT

    def report(self) -> ExpertReport | None:
        """The report of all sparse layers; None without any."""
        use = self.use()
        return None if use is None else ExpertReport(use, jnp.sum(self.num_dropped_BT, axis=1))
