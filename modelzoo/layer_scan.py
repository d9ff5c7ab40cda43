"""A group of layers as one loop: a `jax.lax.scan` over the repeats of its pattern.

The loop contains the computation of one repeat, so programs of deep models stay small. The first
axis of weights is layers, and each iteration gets a slice. A few weights are passed whole, and the
block takes smaller slices itself. The cache of all layers is the carry of the loop, so it is
written in place.

Does not know what a layer computes or caches.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from .cache.layer_state import Cache
from .layer_groups import Group
from .layers import is_sliced_once
from .moe.call import ExpertCall
from .weights.quantised_weight import as_slices


def scan_group(
    run_group: Callable[..., tuple[jax.Array, Cache]],
    group: Group,
    blocks: Sequence[Any],
    x_BTD: jax.Array,
    cache: Cache,
    experts: ExpertCall,
) -> tuple[jax.Array, Cache]:
    """Run all layers of a group with several repeats.

    Args:
      run_group: Runs one repeat of a group, one layer of each of its blocks. It gets the group,
        the blocks, the residual stream, the cache, the index of the repeat, which is that of a
        layer in the arrays of its block, and the call of sparse layers. It returns the residual
        stream and the updated cache.
      group: The layers of each block.
      blocks: The blocks, with the weights of all their layers.
      x_BTD: The residual stream before the group.
      cache: The cache of each block.
      experts: The call of sparse layers; gets the report of all layers of the group.

    Returns:
      The residual stream after the group, and the updated cache.
    """
    definition, whole_weights, weights = nnx.split(nnx.List(blocks), is_sliced_once, ...)

    def body(carry: tuple[jax.Array, Cache], inputs: tuple[jax.Array, Any]):
        scan_index, weights = inputs
        call = ExpertCall(experts.is_token_BT, experts.dispatch, scan_index)
        blocks = nnx.merge(definition, whole_weights, as_slices(weights))
        carry = run_group(group, blocks, *carry, scan_index, call)
        return carry, (call.use(), call.num_dropped_BT)

    iterations = (jnp.arange(len(group[0])), weights)
    (x_BTD, cache), (use, num_dropped) = jax.lax.scan(body, (x_BTD, cache), iterations)
    if use is not None:
        # the first axes are the iterations and the sparse layers of an iteration: flattened, they
        # are all sparse layers in order
        use = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), use)
        experts.add(use, jnp.sum(num_dropped, axis=0))
    return x_BTD, cache
