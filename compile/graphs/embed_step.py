"""Graph body of embeddings: whole texts in, one vector for each text out.

It has no cache and no state. Knows nothing of requests, text, queues or clocks.
"""

from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from ...modelzoo.moe.call import ExpertReport

if TYPE_CHECKING:
    from ...modelzoo.decoder import Decoder


class EmbedOutput(NamedTuple):
    """The arrays that go to the host after an embedding call."""

    vectors_BD: jax.Array
    """The float32 vector of each text."""
    is_finite_B: jax.Array
    experts: ExpertReport | None


def embed_step(
    decoder: "Decoder", tokens_BT: jax.Array, count_B: jax.Array, first_B: jax.Array
) -> EmbedOutput:
    """Compute the vectors of some texts. Static: B, T.

    Args:
      decoder: The model, bound to its parameters.
      tokens_BT: Token ids, padded on the right.
      count_B: The number of tokens of each text; 0 for rows without one.
      first_B: The number of tokens of the first of two texts in a row; models without token types
        do not read it.
    """
    x_BTD, experts = decoder.forward(tokens_BT, count_B, first_B)
    vectors_BD = decoder.pool(x_BTD, count_B)
    return EmbedOutput(vectors_BD, jnp.isfinite(vectors_BD).all(axis=-1), experts)
