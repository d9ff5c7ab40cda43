"""The operations of a model over a mesh: each is one `shard_map` with explicit collectives.

The partitioner decides only about elementwise work and the sums of norms. So a layout asks for the
same communication on every platform, and this file shows it. XLA may implement a collective in
another way, for example a reduce-scatter as an all-reduce and a slice.

Knows nothing of graphs or files. Guarantees: every operation equals its reference in
`modelzoo.operations`, up to the order of sums.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..modelzoo import axes
from ..modelzoo.attention.attend import Attend, Queries
from ..modelzoo.cache.layer_state import LayerState, PromptKeysValues, PromptLatents
from ..modelzoo.cache.pages import match_heads
from ..modelzoo.cache.stripes import ONE_STRIPE, Stripe, Stripes
from ..modelzoo.config import head_copies
from ..modelzoo.moe.experts import ExpertWeights
from ..modelzoo.moe.mix import Mixture, MoeOutput
from ..modelzoo.moe.routing import Router
from ..modelzoo.operations import Operations, row_of
from ..modelzoo.weights.product import Product
from ..modelzoo.weights.quantised_weight import QuantisedWeight, map_arrays, take_rows
from ..modelzoo.weights.weight_products import Axes, Part, axes_of, multiply
from .axis_rules import AxisRules
from .expert_exchange import ExpertExchange
from .projection import Projection
from .ring_attention import Attended, attend_on_ring, merge_shards

if TYPE_CHECKING:
    from flax import nnx

    from ..modelzoo.weights.weight_products import Weight

MeshAxes = tuple[str, ...]


class ShardedOperations(Operations):
    """The operations of one phase of a layout."""

    def __init__(self, mesh: Mesh, rules: AxisRules, stored: AxisRules):
        """Create the operations of a phase from its rules and the rules of the stored weights."""
        self._mesh = mesh
        self._rules = rules
        self._stored = stored
        self.prompt_stripes = Stripes(self._num_shards(axes.LENGTH))
        self.cache_stripes = Stripes(self._num_shards(axes.CACHE_LENGTH))

    def positions(self, length: int) -> jax.Array | np.ndarray:
        if not self._rules[axes.LENGTH]:
            return super().positions(length)
        # not a constant: every device would then hold the angles of all tokens
        position_1T = self.prompt_stripes.permute(jnp.arange(length)[None], axis=1)
        return self.constrain(position_1T, ("", axes.LENGTH))

    def constrain(self, x: jax.Array, logical_axes: Axes) -> jax.Array:
        sharding = NamedSharding(self._mesh, self._rules.spec(logical_axes))
        return jax.lax.with_sharding_constraint(x, sharding)

    def _multiply(
        self, product: Product, x: jax.Array, weight: "Weight", x_axes: Axes, out_axes: Axes,
        dtype: jax.typing.DTypeLike | None,
    ) -> jax.Array:  # fmt: skip
        def multiply_part(x: jax.Array, weight: Any, projection: Projection) -> jax.Array:
            part = Part(projection.max_over_parts)
            return multiply(product, x, weight, dtype=dtype, part=part)

        return self._project(product.equation, multiply_part, x, weight, x_axes, out_axes)

    def _project(
        self, equation: str, product: Callable[[jax.Array, Any, Projection], jax.Array],
        x: jax.Array, weight: "Weight", x_axes: Axes, out_axes: Axes,
    ) -> jax.Array:  # fmt: skip
        """Run `product` on each device, between the collectives of an equation."""
        weight_axes = axes_of(weight)
        projection = Projection.from_rules(
            self._rules, self._stored, equation, x_axes, weight_axes, out_axes
        )

        def local(x: jax.Array, weight: Any) -> jax.Array:
            return projection.reduce(product(*projection.prepare(x, weight), projection))

        weight_specs = map_arrays(
            lambda _, axes: self._stored.spec(axes), weight[...], weight_axes, shared=""
        )
        specs = self._rules.spec(x_axes), weight_specs
        return self._map(local, specs, self._rules.spec(out_axes))(x, weight[...])

    def lookup(self, table: "nnx.Param", ids_BT: jax.Array, out_axes: Axes) -> jax.Array:
        shards = self._rules[axes.VOCAB]

        def rows(
            ids_BT: jax.Array, table_VD: jax.Array | QuantisedWeight, _: Projection
        ) -> jax.Array:
            V = table_VD.shape[0]
            local_BT = ids_BT - jax.lax.axis_index(shards) * V if shards else ids_BT
            is_here_BT = (local_BT >= 0) & (local_BT < V)
            return jnp.where(is_here_BT[..., None], take_rows(table_VD, local_BT), 0)

        ids_axes = (axes.BATCH, axes.LENGTH)
        return self._project("BT,VD->BTD", rows, ids_BT, table, ids_axes, out_axes)

    def attend(
        self, body: Callable[..., tuple[jax.Array, Any]], num_kv_heads: int
    ) -> Callable[..., tuple[jax.Array, Any]]:
        heads = self._rules[axes.QUERY_HEADS]
        exchanged = self._rules.exchanged
        q_spec, *new_specs = map(self._rules.spec, (axes.HEADS, axes.NEW_KEYS, axes.NEW_VALUES))

        def attend(
            queries: Queries,
            new: PromptKeysValues | None,
            latents: PromptLatents | None,
            rows: Any,
            cache: LayerState | None,
        ) -> tuple[jax.Array, Any]:
            G = queries.q_BTKGH.shape[3]
            copies = queries.q_BTKGH.shape[2] // self.num_cache_heads(num_kv_heads)

            def local(queries: Queries, new: PromptKeysValues | None, *others: Any):
                queries = _enter_queries(queries, exchanged, copies)
                if new is not None:
                    new = _enter_keys_values(new, heads, exchanged, copies)
                out_BTKGH, kept = body(queries, new, *others)
                return _leave_attention(out_BTKGH, exchanged, G), kept

            queries_spec = Queries._make((q_spec, self._rules.spec((axes.QUERY_HEADS,))))
            new_spec = P() if new is None else PromptKeysValues._make(new_specs)
            others = tuple(map(self._specs, (latents, rows, cache)))
            kept = next(x for x in (cache, latents, new) if x is not None)
            specs = (queries_spec, new_spec, *others), (q_spec, self._specs(kept))
            return self._map(local, *specs)(queries, new, latents, rows, cache)

        return attend

    def attend_gathered(
        self, body: Callable[..., tuple[jax.Array, Any]], num_kv_heads: int
    ) -> Callable[..., tuple[jax.Array, Any]]:
        heads, num_heads = self._rules[axes.KV_HEADS] or None, self.num_cache_heads(num_kv_heads)
        q_spec = P(None, None, heads, None, None)

        def attend(
            queries: Queries,
            new: PromptKeysValues | None,
            latents: PromptLatents | None,
            rows: Any,
            cache: LayerState,
        ) -> tuple[jax.Array, LayerState]:
            q_BTKGH, sink_KG = queries
            B, T, K, G, H = q_BTKGH.shape
            if sink_KG is not None:
                sink_KG = sink_KG.reshape(num_heads, -1)
            queries = Queries(q_BTKGH.reshape(B, T, num_heads, -1, H), sink_KG)
            if new is not None:
                new = match_heads(new, num_heads)
            cache_specs, queries_spec = self._specs(cache), Queries._make((q_spec, P(heads)))
            specs = queries_spec, P(None, heads), P(), P(), cache_specs
            attend_here = self._map(body, specs, (q_spec, cache_specs))
            out_BTKGH, cache = attend_here(queries, new, latents, rows, cache)
            return out_BTKGH.reshape(B, T, K, G, -1), cache

        return attend

    def local_pages(self, page_BN: jax.Array, num_pages: int) -> jax.Array:
        return _local_rows(page_BN, self._rules[axes.ATTENTION_BATCH], num_pages)

    def merge_pages(
        self, out_BTKGH: jax.Array, lse_BTKG: jax.Array, *, is_gathered: bool
    ) -> Attended:
        mesh_axes = self._rules[axes.CACHE_LENGTH]
        if is_gathered:
            mesh_axes = (*self._rules[axes.ATTENTION_BATCH], *mesh_axes)
        return merge_shards(out_BTKGH, lse_BTKG, mesh_axes) if mesh_axes else (out_BTKGH, lse_BTKG)

    def over_tokens(self, attend: Attend) -> Attend:
        mesh_axes = self._rules[axes.LENGTH]
        return partial(attend_on_ring, attend, mesh_axes) if mesh_axes else attend

    @property
    def stripe(self) -> Stripe:
        mesh_axes = self._rules[axes.CACHE_LENGTH]
        if not mesh_axes:
            return ONE_STRIPE
        return Stripe(jax.lax.axis_index(mesh_axes), self.cache_stripes.count)

    def mix_experts(
        self, mixture: Mixture, x_BTD: jax.Array, is_token_BT: jax.Array, router: Router,
        weights: ExpertWeights,
    ) -> MoeOutput:  # fmt: skip
        exchange = ExpertExchange(self._rules, self._stored)
        return exchange.mix(self._map, mixture, x_BTD, is_token_BT, router, weights)

    def take_row(self, x: jax.Array, row: jax.Array, logical_axes: Axes) -> jax.Array:
        spec, axis = self._rules.spec(logical_axes), axes.row_axis(logical_axes)
        batch = self._rules[logical_axes[axis]]

        def local(x: jax.Array, row: jax.Array) -> jax.Array:
            taken = row_of(x, _local_rows(row, batch, x.shape[axis]), logical_axes)
            return jax.lax.psum(taken, batch) if batch else taken

        return self._map(local, (spec, P()), _row_spec(spec, axis))(x, row)

    def write_rows(
        self, body: Callable[..., Any], old: Any, new: Any, rows: Any, logical_axes: Axes
    ) -> Any:
        spec, axis = self._rules.spec(logical_axes), axes.row_axis(logical_axes)
        batch = self._rules[logical_axes[axis]]

        def local(old: Any, new: Any, rows: Any) -> Any:
            row_B, *others = rows
            row_B = _local_rows(row_B, batch, jax.tree.leaves(old)[0].shape[axis])
            return body(old, new, type(rows)(row_B, *others))

        return self._map(local, (spec, _row_spec(spec, axis), P()), spec)(old, new, rows)

    def num_cache_heads(self, num_kv_heads: int) -> int:
        return num_kv_heads * head_copies(num_kv_heads, self._num_shards(axes.KV_HEADS))

    def top_k(self, logits_BV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        shards = self._rules[axes.VOCAB]
        if not shards:
            return super().top_k(logits_BV, k)
        spec = self._rules.spec((axes.LOGIT_BATCH, axes.VOCAB))

        def local(logits_BV: jax.Array) -> tuple[jax.Array, jax.Array]:
            V = logits_BV.shape[1]
            value_BR, id_BR = jax.lax.top_k(logits_BV, min(k, V))
            id_BR = id_BR + jax.lax.axis_index(shards) * V
            # shards are in the order of ids, so the first of equal candidates has the lowest id
            value_BR = jax.lax.all_gather(value_BR, shards, axis=1, tiled=True)
            id_BR = jax.lax.all_gather(id_BR, shards, axis=1, tiled=True)
            value_BR, index_BR = jax.lax.top_k(value_BR, k)
            return value_BR, jnp.take_along_axis(id_BR, index_BR, axis=1)

        out_spec = P(spec[0], None)
        return self._map(local, (spec,), (out_spec, out_spec))(logits_BV)

    def _num_shards(self, logical_axis: str) -> int:
        return math.prod(self._mesh.shape[axis] for axis in self._rules[logical_axis])

    def _specs(self, x: Any) -> Any:
        """Partitions of the fields of a tree that declares their axes; anything for None."""
        if x is None:
            return P()
        if isinstance(x, LayerState):
            return x.map(lambda _, array: self._rules.spec(array.axes))
        return type(x)._make(map(self._rules.spec, x.AXES))

    def _map(self, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return jax.shard_map(
            body, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def _row_spec(spec: P, axis: int) -> P:
    """Partition of rows of an array; `axis`, the axis of rows, is not split."""
    return P(*spec[:axis], None, *spec[axis + 1 :])


def _local_rows(row_B: jax.Array, batch: MeshAxes, size: int) -> jax.Array:
    """Row numbers on this device; rows of other devices get one past the last."""
    local_B = row_B - jax.lax.axis_index(batch) * size if batch else row_B
    return jnp.where((local_B >= 0) & (local_B < size), local_B, size)


def _enter_queries(queries: Queries, exchanged: MeshAxes, copies: int) -> Queries:
    """Bring queries from the rows and heads of projections to those of attention.

    Over the mesh axes `exchanged`, attention has fewer rows and more heads than the projections:
    each device gives heads away and gets rows (Pope et al. 2022, section 3.3). Sinks have no rows,
    so they are gathered.
    """
    q_BTKGH, sink_KG = queries
    if exchanged:
        q_BTKGH = jax.lax.all_to_all(q_BTKGH, exchanged, split_axis=0, concat_axis=2, tiled=True)
    if exchanged and sink_KG is not None:
        sink_KG = jax.lax.all_gather(sink_KG, exchanged, tiled=True)
    # the queries of neighbouring copies of a key/value head are queries of one head
    B, T, K, _, H = q_BTKGH.shape
    sink_KG = None if sink_KG is None else sink_KG.reshape(K // copies, -1)
    return Queries(q_BTKGH.reshape(B, T, K // copies, -1, H), sink_KG)


def _enter_keys_values(
    new: PromptKeysValues, heads: MeshAxes, exchanged: MeshAxes, copies: int
) -> PromptKeysValues:
    """Bring keys and values from the rows and heads of projections to those of attention.

    A head that the projections hold in several `copies` is sent in as many pieces, one from each
    holder, and put together again.
    """
    k_BKHT, v_BKTH = new
    if not exchanged:
        return PromptKeysValues(k_BKHT[:, ::copies], v_BKTH[:, ::copies])
    exchange = partial(jax.lax.all_to_all, axis_name=exchanged, split_axis=0, tiled=True)
    k_BKHT = exchange(_piece_of_copy(k_BKHT, 2, heads, copies), concat_axis=1)
    v_BKTH = exchange(_piece_of_copy(v_BKTH, 3, heads, copies), concat_axis=1)
    B, _, _, T = k_BKHT.shape
    k_BKHT = k_BKHT.reshape(B, k_BKHT.shape[1] // copies, -1, T)
    pieces_BKCTH = v_BKTH.reshape(B, v_BKTH.shape[1] // copies, copies, T, -1)
    v_BKTH = pieces_BKCTH.swapaxes(2, 3).reshape(B, pieces_BKCTH.shape[1], T, -1)
    return PromptKeysValues(k_BKHT, v_BKTH)


def _leave_attention(out_BTKGH: jax.Array, exchanged: MeshAxes, G: int) -> jax.Array:
    """Bring results back to the rows and heads of projections: G queries to a key/value head."""
    B, T, _, _, H = out_BTKGH.shape
    out_BTKGH = out_BTKGH.reshape(B, T, -1, G, H)
    if not exchanged:
        return out_BTKGH
    return jax.lax.all_to_all(out_BTKGH, exchanged, split_axis=2, concat_axis=0, tiled=True)


def _piece_of_copy(x: jax.Array, axis: int, heads: MeshAxes, copies: int) -> jax.Array:
    """The share of the head dimension that this device sends of each head: copy c sends piece c."""
    if copies == 1:
        return x
    K, size = x.shape[1], x.shape[axis] // copies
    first = jax.lax.axis_index(heads) * K
    pieces = [
        jax.lax.dynamic_slice_in_dim(x[:, k : k + 1], (first + k) % copies * size, size, axis=axis)
        for k in range(K)
    ]
    return jnp.concatenate(pieces, axis=1)
