"""The products of a layer with its weights, as the blocks of `modelzoo` ask for them.

Data alone: einsums, logical axes, and sizes where they are not the layer's own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..modelzoo import axes
from ..modelzoo.config import DecoderConfig, LatentAttention
from ..modelzoo.operations import Axes


@dataclass(frozen=True)
class LayerProduct:
    """A product of activations and a weight."""

    equation: str
    x: Axes
    weight: Axes
    out: Axes
    sizes: Mapping[str, int] = field(default_factory=dict)
    """By dimension letter, beside the sizes of every layer."""

    @property
    def reads(self) -> tuple[str, Axes]:
        """The array of activations: products of a block that agree in this read the same one."""
        return self.labels[0], self.x

    @property
    def labels(self) -> tuple[str, str, str]:
        """Dimension letters of the activations, the weight and the result."""
        inputs, out = self.equation.split("->")
        x, weight = inputs.split(",")
        return x, weight, out


_HEADS = (axes.QUERY_HEADS, "", "")


def attention_products(config: DecoderConfig, *, reads_cache: bool) -> list[LayerProduct]:
    """Those around a layer's attention."""
    if config.latent is not None:
        return _latent_products(config.latent, reads_cache)
    into, out_of = (axes.EMBED_IN, *_HEADS), (*_HEADS, axes.EMBED_IN)
    return [
        LayerProduct("BTD,DKJH->BTKJH", axes.RESIDUAL, into, axes.HEADS),
        LayerProduct("BTKGH,KGHD->BTD", axes.HEADS, out_of, axes.RESIDUAL),
    ]


def _latent_products(latent: LatentAttention, reads_cache: bool) -> list[LayerProduct]:
    down, heads = (axes.EMBED_IN, ""), axes.LATENT_HEADS
    kept, of_head = {"H": latent.kept_dim}, {"H": latent.head_dim, "I": latent.query_rank or 0}
    found = [LayerProduct("BTD,DH->BTH", axes.RESIDUAL, down, axes.LATENTS, kept)]
    if latent.query_rank is None:
        query = (axes.EMBED_IN, axes.QUERY_HEADS, "")
        found.append(LayerProduct("BTD,DNH->BTNH", axes.RESIDUAL, query, heads, of_head))
    else:
        query = ("", axes.QUERY_HEADS, "")
        found += [
            LayerProduct("BTD,DI->BTI", axes.RESIDUAL, down, axes.LATENTS, of_head),
            LayerProduct("BTI,INH->BTNH", axes.LATENTS, query, heads, of_head),
        ]
    plain, value = ({"H": dim, "I": latent.rank} for dim in (latent.plain_dim, latent.value_dim))
    if reads_cache:
        found += [
            LayerProduct("BTNH,NHI->BTNI", heads, _HEADS, heads, plain),
            LayerProduct("BTNI,NHI->BTNH", heads, _HEADS, heads, value),
        ]
    else:
        found += [
            LayerProduct("BTI,NHI->BTNH", axes.LATENTS, _HEADS, heads, of_dim)
            for of_dim in (plain, value)
        ]
    output = (axes.QUERY_HEADS, "", axes.EMBED_IN)
    return [*found, LayerProduct("BTNH,NHD->BTD", heads, output, axes.RESIDUAL, value)]


def mlp_products(mlp: int) -> list[LayerProduct]:
    """Those of a gated MLP with this hidden size; none for a size of 0."""
    if not mlp:
        return []
    gate_up, down = ("", axes.EMBED_IN, axes.MLP), (axes.MLP, axes.EMBED_IN)
    hidden, of_mlp = ("", *axes.HIDDEN), {"F": mlp}
    return [
        LayerProduct("BTD,PDF->PBTF", axes.RESIDUAL, gate_up, hidden, of_mlp),
        LayerProduct("BTF,FD->BTD", axes.HIDDEN, down, axes.RESIDUAL, of_mlp),
    ]
