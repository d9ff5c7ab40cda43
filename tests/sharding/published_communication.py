"""Published formulas for the communication of a dense layer, to check the derived formulas.

Source: Pope et al. 2022, "Efficiently Scaling Transformer Inference" (2211.05102): section 3.2.1
and appendix A.2.1 for one-dimensional weight-stationary, 3.2.2 and A.2.2 for two-dimensional, 3.2.3
and A.2.3 for weight-gathered, 3.3 for attention sharded over batch; Korthikanti et al. 2022,
"Reducing Activation Recomputation in Large Transformer Models" (2205.05198), section 4.2.2, for
sequence-parallel residuals; Liu et al. 2023, "Ring Attention" (2310.01889), section 3, for keys and
values that go round the ring. The papers count the MLP. The formulas here add the projections of
attention, which runs before the MLP here, and the sums for norms of a split residual stream.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from alike import alike

from noria.modelzoo import axes
from noria.modelzoo.config import DecoderConfig, head_copies
from noria.sharding.layer_shapes import ExpectedCollective
from noria.sharding.layout import Layout

FLOAT32_BYTES = 4


@dataclass(frozen=True)
class LayerSizes:
    """Sizes of one layer in one graph: all rows, all devices."""

    rows: int
    tokens: int
    """Tokens of a row: its length in prefill, 1 in decode."""
    embed: int
    mlp: int
    query_heads: int
    kv_heads: int
    """Key/value heads as stored, copies included."""
    kv_copies: int
    """Stored copies of each head. Attention split by rows needs only one of them."""
    head_dim: int
    itemsize: int

    @classmethod
    def of(
        cls, config: DecoderConfig, layout: Layout, rows: int, tokens: int, itemsize: int
    ) -> "LayerSizes":
        """Return the sizes of a model's layers under a layout."""
        shards = layout.mesh.num_shards(layout.rules[axes.QUERY_HEADS])
        copies = head_copies(alike(config).num_kv_heads, shards)
        return cls(
            rows,
            tokens,
            config.embed,
            alike(config).mlp,
            alike(config).num_query_heads,
            alike(config).num_kv_heads * copies,
            copies,
            alike(config).head_dim,
            itemsize,
        )

    @property
    def residual(self) -> int:
        """Bytes of the residual stream."""
        return self.rows * self.tokens * self.embed * self.itemsize

    @property
    def norm(self) -> int:
        """Bytes of one float32 number for each token, which a norm over split entries sums."""
        return self.rows * self.tokens * FLOAT32_BYTES

    @property
    def queries(self) -> int:
        return self.rows * self.tokens * self.query_heads * self.head_dim * self.itemsize

    @property
    def keys(self) -> int:
        """Bytes of the keys of all heads as stored; values have as many bytes."""
        return self.rows * self.tokens * self.kv_heads * self.head_dim * self.itemsize

    @property
    def lse(self) -> int:
        """Bytes of a float32 number for each token and query head: the weight of a part of keys."""
        return self.rows * self.tokens * self.query_heads * FLOAT32_BYTES

    @property
    def hidden(self) -> int:
        return self.rows * self.tokens * self.mlp * self.itemsize

    @property
    def qkv_weight(self) -> int:
        heads = self.query_heads + 2 * self.kv_heads
        return self.embed * heads * self.head_dim * self.itemsize

    @property
    def output_weight(self) -> int:
        return self.embed * self.query_heads * self.head_dim * self.itemsize

    @property
    def mlp_weight(self) -> int:
        """Bytes of `down`, or of one of gate and up."""
        return self.embed * self.mlp * self.itemsize


Mesh = Mapping[str, int]
Formula = Callable[[LayerSizes, Mesh], list[ExpectedCollective]]


def _silent(sizes: LayerSizes, mesh: Mesh) -> list[ExpectedCollective]:
    """Replicas do not communicate."""
    del sizes, mesh
    return []


def _stationary_1d(sizes: LayerSizes, mesh: Mesh) -> list[ExpectedCollective]:
    """Attention and MLP each end in a sum over all devices of a group."""
    residual = sizes.residual // mesh.get("data", 1)
    return [ExpectedCollective("all-reduce", ("tensor",), residual, 2)]


def _scattered_1d(sizes: LayerSizes, mesh: Mesh) -> list[ExpectedCollective]:
    """Each sum has two halves; between them norms and residuals have a piece of the stream."""
    residual = sizes.residual // mesh.get("data", 1)
    return [
        ExpectedCollective("reduce-scatter", ("tensor",), residual, 2),
        ExpectedCollective("all-gather", ("tensor",), residual, 2),
    ]


def _scattered_embed(sizes: LayerSizes, mesh: Mesh) -> list[ExpectedCollective]:
    """The stream is split along embed, so that each norm also sums over the pieces."""
    return [
        *_scattered_1d(sizes, mesh),
        ExpectedCollective("all-reduce", ("tensor",), sizes.norm, 2),
    ]


def _exchanged_1d(sizes: LayerSizes, mesh: Mesh) -> list[ExpectedCollective]:
    """All-to-alls move queries from heads to rows, and results back.

    They also move keys and values to rows. Each copy of a head sends a part of it.
    """
    group = mesh["tensor"] * mesh.get("data", 1)
    keys = sizes.keys // sizes.kv_copies // group
    return [
        *_stationary_1d(sizes, mesh),
        ExpectedCollective("all-to-all", ("tensor",), sizes.queries // group, 2),
        ExpectedCollective("all-to-all", ("tensor",), keys, 2),
    ]


def _stationary_2d(sizes: LayerSizes, mesh: Mesh) -> list[ExpectedCollective]:
    """Products that contract embed sum over `data`, others over `tensor`.

    Attention is split by rows over `data`: queries, keys and values arrive there scattered, and its
    results are gathered for the next product.
    """
    x, t = mesh["data"], mesh["tensor"]
    return [
        ExpectedCollective("reduce-scatter", ("data",), (sizes.queries + 2 * sizes.keys) // t),
        ExpectedCollective("all-gather", ("data",), sizes.queries // t),
        ExpectedCollective("all-reduce", ("data",), 2 * sizes.hidden // t),
        ExpectedCollective("all-reduce", ("tensor",), sizes.residual // x, 2),
        ExpectedCollective("all-reduce", ("data",), sizes.norm, 2),
    ]


def _gathered(sizes: LayerSizes, mesh: Mesh) -> list[ExpectedCollective]:
    """Weights travel over `data`, and activations over `tensor` as in the 1D form."""
    t = mesh["tensor"]
    return [
        ExpectedCollective("all-gather", ("data",), sizes.qkv_weight // t),
        ExpectedCollective("all-gather", ("data",), sizes.output_weight // t),
        ExpectedCollective("all-gather", ("data",), 2 * sizes.mlp_weight // t),
        ExpectedCollective("all-gather", ("data",), sizes.mlp_weight // t),
        *_stationary_1d(sizes, mesh),
    ]


def _gathered_all(sizes: LayerSizes, mesh: Mesh) -> list[ExpectedCollective]:
    """Only weights travel, first over their first dimension's mesh axis, then over the other."""
    x, t = mesh["data"], mesh["tensor"]
    return [
        ExpectedCollective("all-gather", ("data",), sizes.qkv_weight // t),
        ExpectedCollective("all-gather", ("tensor",), sizes.qkv_weight),
        ExpectedCollective("all-gather", ("tensor",), sizes.output_weight // x),
        ExpectedCollective("all-gather", ("data",), sizes.output_weight),
        ExpectedCollective("all-gather", ("data",), 2 * sizes.mlp_weight // t),
        ExpectedCollective("all-gather", ("tensor",), 2 * sizes.mlp_weight),
        ExpectedCollective("all-gather", ("tensor",), sizes.mlp_weight // x),
        ExpectedCollective("all-gather", ("data",), sizes.mlp_weight),
    ]


def _ring(sizes: LayerSizes, mesh: Mesh) -> list[ExpectedCollective]:
    """Keys and values pass from device to device until each has seen all of them."""
    n = mesh["sequence"]
    keys = sizes.keys // (n * mesh.get("tensor", 1) * mesh.get("data", 1))
    return [ExpectedCollective("collective-permute", ("sequence",), keys, 2 * (n - 1))]


def _merged(sizes: LayerSizes, mesh: Mesh) -> list[ExpectedCollective]:
    """A merge is a maximum and a sum of weighted results, whatever the number of keys."""
    lse = sizes.lse // (mesh.get("tensor", 1) * mesh.get("data", 1))
    return [
        ExpectedCollective("all-reduce", ("sequence",), lse),
        ExpectedCollective("all-reduce", ("sequence",), lse * (sizes.head_dim + 1)),
    ]


def _scattered_in_group(sizes: LayerSizes, mesh: Mesh) -> list[ExpectedCollective]:
    """The 1D form within groups: each group has a part of the tokens."""
    return _scattered_1d(replace(sizes, tokens=sizes.tokens // mesh["sequence"]), mesh)


def _gathered_mlp(sizes: LayerSizes, mesh: Mesh) -> list[ExpectedCollective]:
    """For long prompts, the ring gathers the MLP weights that it splits."""
    del mesh
    return [
        ExpectedCollective("all-gather", ("sequence",), 2 * sizes.mlp_weight),
        ExpectedCollective("all-gather", ("sequence",), sizes.mlp_weight),
    ]


def _split_mlp(sizes: LayerSizes, mesh: Mesh) -> list[ExpectedCollective]:
    """Every device has the tokens of its replica, and a part of the MLP."""
    return [ExpectedCollective("all-reduce", ("sequence",), sizes.residual // mesh["data"])]


def _both(attention: Formula, rest: Formula) -> Formula:
    return lambda sizes, mesh: [*attention(sizes, mesh), *rest(sizes, mesh)]


FORMULAS: Mapping[str, Mapping[str, Formula]] = {
    name: {"prefill": prefill, "decode": decode}
    for name, prefill, decode in (
        ("data-parallel", _silent, _silent),
        ("weight-stationary-1d", _stationary_1d, _stationary_1d),
        ("weight-stationary-1d-kv-copies", _stationary_1d, _stationary_1d),
        ("weight-stationary-1d-batch-attention", _stationary_1d, _exchanged_1d),
        ("weight-stationary-2d", _stationary_2d, _stationary_2d),
        ("weight-gathered", _gathered, _stationary_2d),
        ("weight-gathered-all", _gathered_all, _stationary_2d),
        ("data-tensor", _stationary_1d, _stationary_1d),
        ("data-tensor-batch-attention", _stationary_1d, _exchanged_1d),
        ("sequence-parallel", _scattered_1d, _scattered_1d),
        ("embed-parallel", _scattered_embed, _scattered_embed),
        ("ring", _ring, _merged),
        ("ring-tensor", _both(_ring, _scattered_in_group), _both(_merged, _stationary_1d)),
        ("ring-data-expert", _both(_ring, _gathered_mlp), _both(_merged, _split_mlp)),
    )
}
"""Formulas by name of the layout and by phase."""
