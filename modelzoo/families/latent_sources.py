"""Sources of the parameters of latent attention.

Published projections have the parts of each head side by side: queries have a plain and a rotated
part, and the projection from latents has a key and a value. Knows nothing of files.
"""

from dataclasses import dataclass, replace

from ..latent_config import LatentAttention
from ..layer_config import Attention
from .mapping import ParameterSource, TensorPart


@dataclass(frozen=True)
class LatentNames:
    """The tensor names of latent attention in a format, as in `TensorNames`.

    If `key_up` and `value_up` have the same name, they are one tensor, with the rows of the key and
    then of the value for each head. Otherwise they are separate, `[N, I, H]` for keys and
    `[N, H, I]` for values, in the form that absorbed attention applies.
    """

    query: str
    """The projection of queries, if they have no latent."""
    query_down: str
    query_norm: str
    query_up: str
    latent_down: str
    latent_norm: str
    key_up: str
    value_up: str
    output: str


def latent_attention(
    attention: Attention, names: LatentNames, is_interleaved: bool
) -> list[ParameterSource]:
    """The sources of the latent attention of a layer."""
    latent, num_heads = attention.latent, attention.num_query_heads
    assert latent is not None
    names = replace(names, **{key: f"{name}.weight" for key, name in vars(names).items()})
    query = names.query if latent.query_rank is None else names.query_up
    n, rotated = ("n", num_heads), ("pair", latent.rope_dim // 2)
    # the order of rotated rows as published, and as our rotation expects them
    published, ours = ("pair side" if is_interleaved else "side pair"), "(side pair)"
    plain_rows = (0, latent.plain_dim)
    rope_rows = (latent.plain_dim, latent.head_dim)
    heads = latent.head_dim
    parts = {
        "query": (
            TensorPart(query, "(n h) d -> d n h", (n,), plain_rows, heads),
            TensorPart(query, f"(n {published}) d -> d n {ours}", (n, rotated), rope_rows, heads),
        ),
        "latent_down": (
            TensorPart(names.latent_down, "i d -> d i", (), (0, latent.rank)),
            TensorPart(
                names.latent_down,
                f"({published}) d -> d {ours}",
                (rotated,),
                (latent.rank, latent.cache_dim),
            ),
        ),
        "latent_norm.scale": (TensorPart(names.latent_norm, "i -> i"),),
        "output": (TensorPart(names.output, "d (n h) -> n h d", (n,)),),
        **_up(num_heads, latent, names),
    }
    if latent.query_rank is not None:
        parts["query_down"] = (TensorPart(names.query_down, "i d -> d i"),)
        parts["query_norm.scale"] = (TensorPart(names.query_norm, "i -> i"),)
    concat_axes = {"query": 2, "latent_down": 1}
    return [
        ParameterSource(f"attention.{name}", tensor_parts, concat_axes.get(name, 0))
        for name, tensor_parts in parts.items()
    ]


def _up(
    num_heads: int, latent: LatentAttention, names: LatentNames
) -> dict[str, tuple[TensorPart, ...]]:
    """The parts of the projections from latents to keys and values."""
    if names.key_up != names.value_up:
        return {
            "key_up": (TensorPart(names.key_up, "n i h -> n h i"),),
            "value_up": (TensorPart(names.value_up, "n h i -> n h i"),),
        }
    axes, sizes = "(n h) i -> n h i", (("n", num_heads),)
    key, both = latent.plain_dim, latent.plain_dim + latent.value_dim
    return {
        "key_up": (TensorPart(names.key_up, axes, sizes, (0, key), both),),
        "value_up": (TensorPart(names.value_up, axes, sizes, (key, both), both),),
    }
