"""The call of a model as its sparse layers see it: its tokens, and the reports of the layers."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from .config import LOSSLESS, Dispatch
from .use import ExpertReport, ExpertUse


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
