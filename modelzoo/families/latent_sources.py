"""From tensor names to the parameters of latent attention.

Published projections hold what each head needs side by side: of queries a plain and a rotated part,
of what is made from latents a key and a value. Knows nothing of files.
"""

from dataclasses import dataclass, fields, replace

from ..config import LatentAttention
from .mapping import ParameterSource, TensorPart


@dataclass(frozen=True)
class LatentNames:
    """What a format calls the tensors of latent attention, as in `TensorNames`.

    Where keys and values have one name, it is one tensor, with the rows of each head's key and then
    those of its value. Otherwise each is a matrix a head, `[N, I, H]` of keys and `[N, H, I]` of
    values: as they are applied to queries and to results of attention to latents.
    """

    query: str
    """Where queries have no latent."""
    query_down: str
    query_norm: str
    query_up: str
    latent_down: str
    latent_norm: str
    key_up: str
    value_up: str
    output: str

    def weights_of(self, i: int) -> "LatentNames":
        """Whole names of a layer's tensors."""
        names = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{key: f"{name.format(i=i)}.weight" for key, name in names.items()})


def latent_attention(
    num_heads: int, latent: LatentAttention, names: LatentNames, is_interleaved: bool, i: int
) -> list[ParameterSource]:
    """Sources of a layer's latent attention."""
    names = names.weights_of(i)
    query = names.query if latent.query_rank is None else names.query_up
    n, rotated = ("n", num_heads), ("pair", latent.rope_dim // 2)
    # rows of what is rotated as published, and as our rotation wants them
    published, ours = ("pair side" if is_interleaved else "side pair"), "(side pair)"
    plain = (0, latent.plain_dim)
    turned = (latent.plain_dim, latent.head_dim)
    heads = latent.head_dim
    parts = {
        "query": (
            TensorPart(query, "(n h) d -> d n h", (n,), plain, heads),
            TensorPart(query, f"(n {published}) d -> d n {ours}", (n, rotated), turned, heads),
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
    joined_along = {"query": 2, "latent_down": 1}
    return [
        ParameterSource(f"layers.{i}.attention.{name}", of, joined_along.get(name, 0))
        for name, of in parts.items()
    ]


def _up(
    num_heads: int, latent: LatentAttention, names: LatentNames
) -> dict[str, tuple[TensorPart, ...]]:
    """Of what makes keys and values from latents."""
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
