"""Bytes on each device, from shapes alone, against the published claim and real arrays."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from alike import changed
from laid_out import layout_of, num_slot_groups

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import plan_graphs
from noria.compile.graphs.graph_kinds import FORK
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.targets import find_target
from noria.modelzoo.config import AS_PUBLISHED, Arrangement, DecoderConfig
from noria.modelzoo.latent_config import LatentAttention
from noria.sharding.device_bytes import entry_bytes_per_device, parameter_bytes_per_device
from noria.sharding.layout import Layout

CHIPS, LAYERS = 64, 118
CACHE_BYTES = int(0.3 * 32 * 2**30)
"""Pope et al. 2022, table 1: 30 % of a TPU v4's memory for the cache, PaLM's 118 layers."""


def palm(kv_heads: int, head_dim: int) -> DecoderConfig:
    return DecoderConfig.alike(
        vocab_size=256_000,
        embed=18_432,
        mlp=73_728,
        num_query_heads=64,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        windows=(None,) * LAYERS,
        max_position=2**20,
    )


MULTIHEAD, MULTIQUERY = palm(64, 128), palm(1, 256)


def on_chips(name: str) -> Layout:
    return layout_of(f"{name}@tensor={CHIPS}")


def cache_bytes(
    config: DecoderConfig,
    layout: Layout,
    entries: int,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    arrangement: Arrangement = AS_PUBLISHED,
) -> float:
    """Return the bytes of so many entries in all layers on one device, on average."""
    return entries * sum(
        entry_bytes_per_device(x, layout, dtype, arrangement) for x in config.attentions
    )


@pytest.mark.parametrize(
    ("batch", "contexts"), [(128, (1332, 666, 42_653)), (512, (333, 166, 10_663))]
)
def test_multiquery_attention_over_batch_holds_32_times_the_context_of_multihead(batch, contexts):
    """The paper's table 1 has 1320, 660 and 43,000 at batch 128, and 330, 165 and 10,700 at 512."""
    over_heads = on_chips("weight-stationary-1d-kv-copies")
    over_batch = on_chips("weight-stationary-1d-batch-attention")
    bytes_of = [
        cache_bytes(config, layout, batch)
        for config, layout in (
            (MULTIHEAD, over_heads),
            (MULTIQUERY, over_heads),
            (MULTIQUERY, over_batch),
        )
    ]
    assert tuple(int(CACHE_BYTES / of_positions) for of_positions in bytes_of) == contexts
    assert bytes_of[0] == 32 * bytes_of[2]
    assert bytes_of[1] == 64 * bytes_of[2]


SMALL = DecoderConfig.alike(
    vocab_size=104,
    embed=32,
    mlp=64,
    num_query_heads=16,
    num_kv_heads=2,
    head_dim=8,
    windows=(None, None),
    max_position=64,
)


SOME_LAYOUTS = pytest.mark.parametrize(
    "name", ["data-parallel", "v5e-host", "v5p-slice", "data-tensor-batch-attention"]
)


@pytest.mark.parametrize("codes", [None, "int8"])
@SOME_LAYOUTS
def test_the_cache_takes_the_bytes_of_its_shards(name, codes):
    layout = layout_of(name)
    placement = find_target("cpu:8").placement(layout)
    arrangement = placement.arrangement(SMALL, cache_codes=codes)
    definition = AbstractModel(SMALL, arrangement)
    grid = BucketGrid(16, ((8, 8),), 8, page=8, slot_groups=num_slot_groups(layout))
    graphs = plan_graphs(definition, grid, placement, jnp.dtype(jnp.float32))
    (state,) = (graph.arguments[0] for graph in graphs if graph.key == FORK)
    arrays = jax.tree.leaves(state.cache)
    expected = sum(jnp.zeros(x.sharding.shard_shape(x.shape), x.dtype).nbytes for x in arrays)
    assert grid.pages == 16
    assert cache_bytes(SMALL, layout, 16 * 8, jnp.float32, arrangement) == expected


@SOME_LAYOUTS
def test_the_bytes_are_those_of_the_shards(name):
    layout = layout_of(name)
    placement = find_target("cpu:8").placement(layout)
    definition = AbstractModel(SMALL, placement.arrangement(SMALL))
    abstract = definition.abstract_parameters(jnp.float32)
    shardings = placement.parameters(definition.logical_axes())
    shards = {name: shardings[name].shard_shape(leaf.shape) for name, leaf in abstract.items()}
    expected = sum(jnp.zeros(shard).nbytes for shard in shards.values())
    logical_axes = definition.logical_axes()
    assert parameter_bytes_per_device(layout, abstract, logical_axes) == expected


@pytest.mark.parametrize(
    ("name", "rows"), [("data-parallel", 2), ("v5e-host", 16), ("v5p-slice", 2), ("data-tensor", 8)]
)
def test_a_cache_of_latents_is_whole_on_every_device_that_has_the_row(name, rows):
    latent = LatentAttention(rank=12, plain_dim=5, rope_dim=4, value_dim=6)
    config = changed(SMALL, num_kv_heads=16, head_dim=9, latent=latent)
    got = cache_bytes(config, layout_of(name), 16 * 64)
    assert got == config.num_layers * rows * 64 * (12 + 4) * 2
    codes = replace(AS_PUBLISHED, cache_codes="int8")
    got = cache_bytes(config, layout_of(name), 16 * 64, arrangement=codes)
    assert got == config.num_layers * rows * 64 * (12 + 4 + 2 * 2)
