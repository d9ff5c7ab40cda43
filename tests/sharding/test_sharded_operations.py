"""Each operation over a mesh equals its reference on one device.

Values are small integers, so that sums are exact in any order and every comparison is `==`.
"""

import subprocess
import sys
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from noria.modelzoo import axes
from noria.modelzoo.attention.attend import Queries
from noria.modelzoo.cache.layer_state import PromptKeysValues
from noria.modelzoo.config import head_copies
from noria.modelzoo.operations import ON_ONE_DEVICE
from noria.modelzoo.weights.product import einsum
from noria.sharding.axis_rules import AxisRules
from noria.sharding.layout import Layout
from noria.sharding.mesh_layout import MeshLayout
from noria.sharding.sharded_operations import ShardedOperations

SIZES = {"data": 2, "tensor": 4}
RNG = np.random.default_rng(0)


def integers(*shape: int) -> np.ndarray:
    return RNG.integers(-4, 5, shape).astype(np.float32)


@cache
def mesh() -> Mesh:
    return MeshLayout.from_table(SIZES).build(jax.devices())


def rules_of(**rules: str | list[str]) -> AxisRules:
    return Layout.from_table({"mesh": SIZES, "rules": rules}).rules


def operations(used: AxisRules, stored: AxisRules | None = None) -> ShardedOperations:
    return ShardedOperations(mesh(), used, stored or used)


def run(function, *arguments: Any) -> Any:
    return jax.tree.map(np.asarray, jax.jit(function)(*arguments))


ONE_DIMENSION = rules_of(mlp="tensor", query_heads="tensor", vocab="tensor")
TWO_DIMENSIONS = rules_of(
    embed_in="data", embed="data", mlp="tensor", query_heads="tensor", vocab=["data", "tensor"]
)
REPLICAS = rules_of(batch="data", mlp="tensor", query_heads="tensor", vocab="tensor")
BY_TOKENS = REPLICAS.updated({"residual_length": ("tensor",)})
BY_ROWS = ONE_DIMENSION.updated({"residual_batch": ("tensor", "data")})
GATHERED = TWO_DIMENSIONS.updated(
    {"batch": ("data", "tensor"), "embed_in": (), "embed": (), "mlp": (), "vocab": ("data",)}
)
PHASES = pytest.mark.parametrize(
    ("used", "stored"),
    [
        (AxisRules({}), None),
        (ONE_DIMENSION, None),
        (TWO_DIMENSIONS, None),
        (REPLICAS, None),
        (BY_TOKENS, REPLICAS),
        (BY_ROWS, ONE_DIMENSION),
        (GATHERED, TWO_DIMENSIONS),
        (TWO_DIMENSIONS.updated({"batch": ("data",), "embed": ()}), TWO_DIMENSIONS),
    ],
    ids=[
        "whole", "1d", "2d", "replicas", "by tokens", "by rows", "gathered", "batch over embed_in",
    ],
)  # fmt: skip


@PHASES
def test_projections_up_and_down_give_the_product(used, stored):
    x_BTD, up_DF, down_FD = integers(8, 4, 16), integers(16, 8), integers(8, 16)
    up = nnx.Param(jnp.asarray(up_DF), logical_axes=(axes.EMBED_IN, axes.MLP))
    down = nnx.Param(jnp.asarray(down_FD), logical_axes=(axes.MLP, axes.EMBED_IN))

    def both(operations, x_BTD):
        h_BTF = operations.project(einsum("BTD,DF->BTF"), x_BTD, up, axes.RESIDUAL, axes.HIDDEN)
        return operations.project(
            einsum("BTF,FD->BTD"), h_BTF, down, axes.HIDDEN, axes.RESIDUAL
        )  # fmt: skip

    got = run(lambda x_BTD: both(operations(used, stored), x_BTD), x_BTD)
    assert (got == x_BTD @ up_DF @ down_FD).all()


@PHASES
def test_looking_up_ids_gives_rows_of_the_table(used, stored):
    table_VD, ids_BT = integers(24, 16), RNG.integers(0, 24, (8, 4))
    table_VD[3] = np.nan
    ids_BT[ids_BT == 3] = 4
    ids_BT[5, 2] = 3
    table = nnx.Param(jnp.asarray(table_VD), logical_axes=(axes.VOCAB, ""))
    got = run(lambda ids: operations(used, stored).lookup(table, ids, axes.RESIDUAL), ids_BT)
    # the row of NaN reaches only the token that reads it
    np.testing.assert_array_equal(got, table_VD[ids_BT])


def test_constrain_places_an_array_and_keeps_its_values():
    x_BV = integers(8, 16)
    over = operations(REPLICAS)
    placed = jax.jit(lambda x_BV: over.constrain(x_BV, axes.LOGITS))(x_BV)
    assert placed.sharding.shard_shape(placed.shape) == (4, 4)
    assert (np.asarray(placed) == x_BV).all()


class Rows(NamedTuple):
    row_B: np.ndarray

    AXES = ((axes.ATTENTION_BATCH,),)


class Entries(NamedTuple):
    cache_BKSH: np.ndarray

    AXES = (axes.CACHE_HEADS[1:],)


class LatentEntries(NamedTuple):
    cache_BSH: np.ndarray

    AXES = (axes.CACHE_LATENTS[1:],)


ATTENTION = {
    "a head a device": (8, {"query_heads": ["data", "tensor"]}),
    "copies": (2, {"query_heads": ["data", "tensor"]}),
    "copies of one head": (1, {"query_heads": "tensor", "batch": "data"}),
    "rows for heads": (8, {"query_heads": "tensor", "attention_batch": "tensor"}),
    "rows for heads in copies": (2, {"query_heads": "tensor", "attention_batch": "tensor"}),
    "rows for heads of which each device holds several copies": (
        3,
        {"query_heads": "tensor", "attention_batch": "tensor"},
    ),
    "rows for some axes of the heads": (
        2,
        {"query_heads": ["data", "tensor"], "attention_batch": "tensor"},
    ),
    "rows for some, heads in copies left": (
        1,
        {"query_heads": ["data", "tensor"], "attention_batch": "tensor"},
    ),
    "rows for all axes of the heads": (
        2,
        {"query_heads": ["tensor", "data"], "attention_batch": ["tensor", "data"]},
    ),
    "further rows beside replicas": (
        2,
        {"query_heads": "tensor", "batch": "data", "attention_batch": ["data", "tensor"]},
    ),
    "rows over an axis without heads": (4, {"query_heads": "tensor", "attention_batch": "data"}),
    "rows over both": (1, {"query_heads": "tensor", "attention_batch": ["data", "tensor"]}),
    "no heads split": (2, {"attention_batch": ["tensor", "data"]}),
    "heads gathered": (2, {"batch": "data", "query_heads": ""}),
    "heads gathered to fewer copies": (2, {"query_heads": "data"}),
}
"""Number of key/value heads, and rules; if they gather heads, all mesh axes split the weights."""


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_sees_its_rows_and_heads_whole_and_gives_them_back(name):
    """The body marks each entry with its row, its head, its sink and the cache's entry."""
    B, T, K, N, H, S = 8, 2, ATTENTION[name][0], 24, 4, 3
    rules = rules_of(**ATTENTION[name][1])
    lies_over = ("data", "tensor") if "gathered" in name else rules[axes.QUERY_HEADS]
    stored = head_copies(K, MeshLayout.from_table(SIZES).num_shards(lies_over))
    kept = head_copies(K, MeshLayout.from_table(SIZES).num_shards(rules[axes.KV_HEADS]))
    G = N // K
    queries = Queries(integers(B, T, K, G, H), 10_000 * integers(K, G))
    row_B = np.arange(B, dtype=np.float32)
    k_BKHT, v_BKTH, cache_BKSH = integers(B, K, H, T), integers(B, K, T, H), integers(B, K, S, H)

    def body(queries, new, latents, rows, cache):
        assert latents is None
        (q_BTKGH, sink_KG), (row_B,), (cache_BKSH,) = queries, rows, cache
        mark_BKTH = new.v_BKTH + 10 * new.k_BKHT.swapaxes(2, 3) + 100 * cache_BKSH[:, :, :1]
        out_BTKGH = (
            q_BTKGH + mark_BKTH.swapaxes(1, 2)[:, :, :, None] + sink_KG[None, None, ..., None]
        )
        out_BTKGH = out_BTKGH + 1000 * row_B[:, None, None, None, None]
        return out_BTKGH, Entries(cache_BKSH + new.v_BKTH[:, :, :1])

    new = PromptKeysValues(k_BKHT, v_BKTH)
    out_BTKGH, (cache,) = body(queries, new, None, Rows(row_B), Entries(cache_BKSH))
    got_BTKGH, (got_cache,) = run(
        operations(rules).attend(body, K),
        Queries(
            queries.q_BTKGH.reshape(B, T, K * stored, G // stored, H),
            queries.sink_KG.reshape(K * stored, G // stored),
        ),
        jax.tree.map(lambda x: np.repeat(x, stored, axis=1), new),
        None,
        Rows(row_B),
        Entries(np.repeat(cache_BKSH, kept, axis=1)),
    )
    assert (got_BTKGH.reshape(out_BTKGH.shape) == out_BTKGH).all()
    assert (got_cache == np.repeat(cache, kept, axis=1)).all()


LATENT_ATTENTION = {
    "heads split": {"query_heads": "tensor"},
    "rows for heads": {"query_heads": "tensor", "attention_batch": "tensor"},
    "rows over both": {
        "batch": "data",
        "query_heads": "tensor",
        "attention_batch": ["data", "tensor"],
    },
}


@pytest.mark.parametrize("rules", LATENT_ATTENTION.values(), ids=LATENT_ATTENTION)
def test_attention_without_new_keys_sees_its_rows_of_what_is_kept_whole(rules):
    B, T, N, H, S = 8, 2, 8, 4, 3
    q_BTKGH, cache_BSH, row_B = integers(B, T, N, 1, H), integers(B, S, H), np.arange(B)

    def body(queries, new, latents, rows, cache):
        assert new is None and latents is None
        (row_B,), (cache_BSH,) = rows, cache
        out_BTKGH = queries.q_BTKGH + 10 * cache_BSH.sum(1)[:, None, None, None]
        return out_BTKGH + 1000 * row_B[:, None, None, None, None], LatentEntries(cache_BSH + 1)

    rows = Rows(row_B.astype(np.float32))
    arguments = (Queries(q_BTKGH), None, None, rows, LatentEntries(cache_BSH))
    expected_BTKGH, (expected_BSH,) = body(*arguments)
    on_mesh = operations(rules_of(**rules))
    got_BTKGH, (got_BSH,) = run(on_mesh.attend(body, N), *arguments)
    assert (got_BTKGH == expected_BTKGH).all()
    assert (got_BSH == expected_BSH).all()


PLACES_OF_ROWS = [{}, {"batch": "data"}, {"batch": ["tensor", "data"]}, {"vocab": "tensor"}]
BY_PLACE_OF_ROWS = pytest.mark.parametrize("rules", PLACES_OF_ROWS, ids=str)


@BY_PLACE_OF_ROWS
def test_a_row_is_taken_from_wherever_it_lies(rules):
    """The other rows may hold any values."""
    x_BV = integers(8, 16)
    x_BV[2], x_BV[5] = np.nan, -np.inf
    over = operations(rules_of(**rules))
    take = jax.jit(lambda x_BV, row: over.take_row(x_BV, row, axes.LOGITS))
    for row in range(8):
        np.testing.assert_array_equal(take(x_BV, np.int32(row)), x_BV[[row]])
    assert not np.any(take(x_BV, np.int32(8)))


@pytest.mark.parametrize("dtype", [np.float32, np.int32, np.bool_])
@BY_PLACE_OF_ROWS
def test_a_row_is_written_where_it_belongs_and_the_others_stay(rules, dtype):
    x_BV, new_1V = integers(8, 16).astype(dtype), (integers(1, 16) + 20).astype(dtype)
    over = operations(rules_of(**rules))

    def body(x_BV, new_BV, rows):
        return x_BV.at[rows.row_B.astype(int)].set(new_BV, mode="drop")

    write = jax.jit(lambda *arrays: over.write_rows(body, *arrays, axes.LOGITS))
    for row in range(8):
        expected_BV = x_BV.copy()
        expected_BV[row] = new_1V[0]
        got_BV = np.asarray(write(x_BV, new_1V, Rows(np.array([row]))))
        assert got_BV.dtype == dtype
        assert (got_BV == expected_BV).all()


def test_the_best_of_a_split_vocabulary_come_lowest_id_first_among_equals():
    """Each of four devices has two ids; each of two replicas has two rows."""
    inf = np.inf
    logits_BV = np.array(
        [
            [1, 3, 3, 2, 3, 0, 3, 3],
            [0, 0, 0, 0, 0, 0, 0, 0],
            [0, 1, 2, 3, 4, 5, 6, 7],
            [-inf, 5, -inf, 5, -inf, -inf, 7, -inf],
        ],
        np.float32,
    )
    value_BR, id_BR = run(lambda x_BV: operations(REPLICAS).top_k(x_BV, 4), logits_BV)
    assert id_BR.tolist() == [[1, 2, 4, 6], [0, 1, 2, 3], [7, 6, 5, 4], [6, 1, 3, 0]]
    assert value_BR.tolist() == [[3, 3, 3, 3], [0, 0, 0, 0], [7, 6, 5, 4], [7, 5, 5, -inf]]


@pytest.mark.parametrize("k", [1, 3, 20, 24])
@pytest.mark.parametrize("used", [ONE_DIMENSION, TWO_DIMENSIONS, REPLICAS, GATHERED])
def test_the_best_of_a_split_vocabulary_are_those_of_a_whole_one(used, k):
    """The number may exceed the ids of a device."""
    logits_BV = integers(8, 24)
    got = run(lambda x_BV: operations(used).top_k(x_BV, k), logits_BV)
    for found, expected in zip(got, ON_ONE_DEVICE.top_k(logits_BV, k), strict=True):
        assert (found == expected).all()


def test_the_operations_of_a_layout_are_there_before_flax_is_imported():
    """A bundle's executables load while flax is still being imported."""
    code = "import sys, noria.sharding.placement; print('flax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
