"""Groups of layers run one after the other; a group of several turns as one loop over them.

A loop holds its layers' computation once, however many turns it has, so programs of deep models
stay small. The weights of a turn are slices of arrays with the layers first; the cache of all turns
is carried through the loop, and so is written in place.

Knows nothing of what a layer computes or keeps.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from .layer_groups import Group
from .moe.layer import ExpertCall

Kept = tuple[Any, ...]
"""The cache of each place of a group; None for each where there is no cache."""


class RunLayer(Protocol):
    """One layer: the residual stream after it, and what it keeps."""

    def __call__(
        self,
        layers: range,
        block: Any,
        x_BTD: jax.Array,
        old: Any,
        turn: jax.Array,
        experts: ExpertCall,
    ) -> tuple[jax.Array, Any]:
        """`layers` are those of the place, `old` what its cache holds before."""
        ...


def run_groups(
    groups: Sequence[Group],
    blocks: Sequence[Any],
    run_layer: RunLayer,
    x_BTD: jax.Array,
    cache: Sequence[Any] | None,
    experts: ExpertCall,
) -> tuple[jax.Array, Kept]:
    """All groups in order; `blocks` and `cache`, if there is one, have an entry for each place."""
    kept: Kept = ()
    for group in groups:
        places = slice(len(kept), len(kept) + len(group))
        old = (None,) * len(group) if cache is None else tuple(cache[places])
        one_turn = partial(_one_turn, group, run_layer)
        num_turns = len(group[0])
        if num_turns == 1:
            x_BTD, made = one_turn(blocks[places], x_BTD, old, jnp.int32(0), experts)
        else:
            x_BTD, made = _loop(one_turn, num_turns, blocks[places], x_BTD, old, experts)
        kept += made
    return x_BTD, kept


def _one_turn(
    group: Group,
    run_layer: RunLayer,
    blocks: Sequence[Any],
    x_BTD: jax.Array,
    old: Kept,
    turn: jax.Array,
    experts: ExpertCall,
) -> tuple[jax.Array, Kept]:
    kept: Kept = ()
    for layers, block, of_place in zip(group, blocks, old, strict=True):
        x_BTD, new = run_layer(layers, block, x_BTD, of_place, turn, experts)
        kept += (new,)
    return x_BTD, kept


def _loop(
    one_turn: Callable[..., tuple[jax.Array, Kept]],
    num_turns: int,
    blocks: Sequence[Any],
    x_BTD: jax.Array,
    old: Kept,
    experts: ExpertCall,
) -> tuple[jax.Array, Kept]:
    definition, weights = nnx.split(nnx.List(blocks))

    def body(carry: tuple[jax.Array, Kept], inputs: tuple[jax.Array, Any]):
        turn, weights = inputs
        call = ExpertCall(experts.is_token_BT, experts.dispatch)
        carry = one_turn(nnx.merge(definition, weights), *carry, turn, call)
        return carry, (call.use(), call.num_dropped_BT)

    turns = (jnp.arange(num_turns), weights)
    (x_BTD, cache), (use, num_dropped) = jax.lax.scan(body, (x_BTD, old), turns)
    if use is not None:
        # turns, and in each its sparse places: layers in order
        use = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), use)
        experts.add(use, jnp.sum(num_dropped, axis=0))
    return x_BTD, cache
