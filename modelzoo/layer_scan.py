"""A group of layers as one loop, a `jax.lax.scan` over the repeats of its pattern.

A loop holds the computation of its layers once, however often it runs, so programs of deep models
stay small. The weights of an iteration are slices of arrays that lead with layers; a few weights
come whole, of which a block takes smaller slices itself. The cache of all layers is carried through
the loop, and so is written in place.

Knows nothing of what a layer computes or keeps.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from .layer_groups import Group
from .layers import is_sliced_once
from .moe.layer import ExpertCall

Cache = tuple[Any, ...]
"""The cache of each place of layers; None for each place where there is no cache."""


class RunGroup(Protocol):
    """Run one layer of each place of a group."""

    def __call__(
        self,
        group: Group,
        blocks: Sequence[Any],
        x_BTD: jax.Array,
        cache: Cache,
        scan_index: jax.Array,
        experts: ExpertCall,
    ) -> tuple[jax.Array, Cache]:
        """The residual stream after these layers, and the cache with what they keep."""
        ...


def scan_group(
    run_group: RunGroup,
    group: Group,
    blocks: Sequence[Any],
    x_BTD: jax.Array,
    cache: Cache,
    experts: ExpertCall,
) -> tuple[jax.Array, Cache]:
    """Run all layers of a group whose places have several; `blocks` have the weights of all."""
    definition, of_all, weights = nnx.split(nnx.List(blocks), is_sliced_once, ...)

    def body(carry: tuple[jax.Array, Cache], inputs: tuple[jax.Array, Any]):
        scan_index, weights = inputs
        call = ExpertCall(experts.is_token_BT, experts.dispatch, scan_index)
        blocks = nnx.merge(definition, of_all, weights)
        carry = run_group(group, blocks, *carry, scan_index, call)
        return carry, (call.use(), call.num_dropped_BT)

    iterations = (jnp.arange(len(group[0])), weights)
    (x_BTD, cache), (use, num_dropped) = jax.lax.scan(body, (x_BTD, cache), iterations)
    if use is not None:
        # iterations, and in each its sparse places: layers in order
        use = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), use)
        experts.add(use, jnp.sum(num_dropped, axis=0))
    return x_BTD, cache
