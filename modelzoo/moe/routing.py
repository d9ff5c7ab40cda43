"""Routing: the experts of each token and their weights, computed in float32."""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from .. import axes
from ..moe_config import ExpertGroups, Routing
from ..weights.product import einsum
from ..weights.weight_products import Project, multiply

if TYPE_CHECKING:
    from ..weights.weight_products import Weight

_EPSILON = 1e-20
"""Term that avoids a division by zero if all sigmoids are zero, as in the code of DeepSeek-V3."""


class Router(NamedTuple):
    """The weights of the router of one layer, replicated on every device."""

    weight_DE: "Weight"
    bias_E: jax.Array | None = None
    choice_bias_E: jax.Array | None = None


class Choices(NamedTuple):
    """The experts of each token, best first; an index equal to the number of experts means none."""

    expert_MZ: jax.Array
    weight_MZ: jax.Array


def route(
    x_BTD: jax.Array,
    is_token_BT: jax.Array,
    router: Router,
    routing: Routing,
    project: Project = multiply,
) -> Choices:
    """Choose the experts of each token; padding gets none. Ties go to the first expert.

    Args:
      x_BTD: The residual stream before the layer.
      is_token_BT: False for padding.
      router: The weights of the router.
      routing: The options of routing.
      project: `Operations.project` of the layout.
    """
    product = einsum("BTD,DE->BTE", with_leading="...D,DE->...E")
    out_axes = (*axes.RESIDUAL[:2], "")
    logits_BTE = project(product, x_BTD, router.weight_DE, axes.RESIDUAL, out_axes, jnp.float32)
    logits_ME = logits_BTE.reshape(-1, routing.num_experts)
    if router.bias_E is not None:
        logits_ME = logits_ME + router.bias_E.astype(jnp.float32)[None]
    match routing.scoring:
        case "softmax":
            scores_ME = jax.nn.softmax(logits_ME, axis=-1)
        case "softmax_of_chosen":
            scores_ME = logits_ME
        case "sigmoid":
            scores_ME = jax.nn.sigmoid(logits_ME)
    # by default experts are ranked by logits: scores may be equal where logits differ
    ranked_ME = logits_ME
    if router.choice_bias_E is not None or routing.groups is not None:
        ranked_ME = scores_ME
    if router.choice_bias_E is not None:
        ranked_ME = ranked_ME + router.choice_bias_E.astype(jnp.float32)[None]
    if routing.groups is not None:
        ranked_ME = _within_best_groups(ranked_ME, routing.groups)
    _, expert_MZ = jax.lax.top_k(ranked_ME, routing.num_chosen)
    weight_MZ = _weights(jnp.take_along_axis(scores_ME, expert_MZ, axis=-1), routing)
    is_token_M1 = is_token_BT.reshape(-1, 1)
    return Choices(jnp.where(is_token_M1, expert_MZ, routing.num_experts), weight_MZ)


def _within_best_groups(ranked_ME: jax.Array, groups: ExpertGroups) -> jax.Array:
    M, E = ranked_ME.shape
    grouped = ranked_ME.reshape(M, groups.count, E // groups.count)
    group_scores = jax.lax.top_k(grouped, groups.best)[0].sum(axis=-1)
    _, best = jax.lax.top_k(group_scores, groups.chosen)
    is_best = jnp.any(best[:, :, None] == jnp.arange(groups.count)[None, None], axis=1)
    return jnp.where(is_best[:, :, None], grouped, -jnp.inf).reshape(M, E)


def _weights(scores_MZ: jax.Array, routing: Routing) -> jax.Array:
    if routing.scoring == "softmax_of_chosen":
        scores_MZ = jax.nn.softmax(scores_MZ, axis=-1)
    elif routing.is_normalized:
        scores_MZ = scores_MZ / (scores_MZ.sum(axis=-1, keepdims=True) + _EPSILON)
    return scores_MZ * routing.scale if routing.scale != 1.0 else scores_MZ
