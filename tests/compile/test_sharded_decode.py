"""Decode under layouts: sampling never brings logits together, and the cache stays in place.

The tests read compiled programs: for simulated CPU devices, and for a TPU slice that is not
present. They count every branch, also the branches of penalties, biases and thresholds, which few
rows take.
"""

from dataclasses import dataclass, replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from alike import alike, changed
from laid_out import layout_of, num_slot_groups

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import compile_graph, plan_graphs
from noria.compile.graphs.graph_kinds import GraphKey
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.programs.collectives import Collective, read_collectives
from noria.compile.targets import find_target
from noria.modelzoo.config import DecoderConfig

CONFIG = DecoderConfig.alike(
    vocab_size=32001,
    embed=64,
    mlp=128,
    num_query_heads=16,
    num_kv_heads=8,
    head_dim=64,
    windows=(None, 16384),
    max_position=32768,
)
"""A long vocabulary and long caches on a small model, so that nothing else is as large."""
GRID = BucketGrid(32768, ((64, 16),), 16, row_tokens=1, steps_per_call=4)
TPU = "tpu:v5e:2x4"
ON_BOTH = pytest.mark.parametrize(
    ("target", "layout"),
    [
        ("cpu:8", "data-tensor"),
        ("cpu:8", "v5p-slice"),
        pytest.param("cpu:8", "weight-stationary-1d", marks=pytest.mark.slow),
        pytest.param("cpu:8", "data-tensor-batch-attention", marks=pytest.mark.slow),
        pytest.param(TPU, "v5p-slice", marks=pytest.mark.tpu_compile),
        *(
            pytest.param(TPU, layout, marks=[pytest.mark.tpu_compile, pytest.mark.slow])
            for layout in ("data-tensor-batch-attention", "weight-stationary-1d", "data-tensor")
        ),
    ],
)


@dataclass(frozen=True)
class Decode:
    """A compiled decode graph, and bytes of its arrays on one device."""

    collectives: list[Collective]
    temporaries: int
    overwritten: int
    """Bytes of arguments whose memory results reuse."""
    logits: int
    cache: int
    smallest_array: int
    """Bytes of the smallest keys or values of a layer."""


@cache
def compiled_decode(
    target: str, layout: str, config: DecoderConfig = CONFIG, scan_layers: bool = False
) -> Decode:
    laid = layout_of(layout)
    placement = find_target(target).placement(laid)
    definition = AbstractModel(config, placement.arrangement(config, scan_layers))
    key = GraphKey("decode")
    grid = replace(GRID, slot_groups=num_slot_groups(laid))
    graphs = plan_graphs(definition, grid, placement, jnp.dtype(jnp.float32))
    graph = next(graph for graph in graphs if graph.key == key)
    compiled, _ = compile_graph(graph)
    state = graph.arguments[1]
    arrays = [num_bytes(leaf) for leaf in jax.tree.leaves(state.cache)]
    return Decode(
        read_collectives(compiled.as_text(), laid.mesh.sizes),
        compiled.memory_analysis().temp_size_in_bytes,
        compiled.memory_analysis().alias_size_in_bytes,
        num_bytes(state.logits_BV),
        sum(arrays),
        min(arrays),
    )


def num_bytes(placed: jax.ShapeDtypeStruct) -> int:
    """Return the bytes of one device's piece."""
    shape = placed.sharding.shard_shape(placed.shape)
    return jax.ShapeDtypeStruct(shape, placed.dtype).size * placed.dtype.itemsize


@ON_BOTH
def test_no_collective_moves_as_much_as_a_device_has_of_the_logits(target, layout):
    """A gather of logits would move all their shards: four or eight times the bound."""
    decode = compiled_decode(target, layout)
    assert decode.collectives
    assert max(one.num_bytes for one in decode.collectives) < decode.logits


@ON_BOTH
def test_no_collective_moves_as_much_as_the_keys_of_a_layer(target, layout):
    decode = compiled_decode(target, layout)
    assert max(one.num_bytes for one in decode.collectives) < decode.smallest_array


@ON_BOTH
def test_decode_works_in_place_on_its_piece_of_the_cache(target, layout):
    """Temporaries are at most a twentieth of the piece, and six float32 pieces of logits.

    That is less than the smallest keys of a layer, so a copy of any would show.
    """
    decode = compiled_decode(target, layout)
    assert decode.overwritten >= decode.cache
    bound = 0.05 * decode.cache + 6 * decode.logits
    assert decode.temporaries <= bound < decode.smallest_array


@pytest.mark.parametrize(
    ("target", "layout"),
    [
        ("cpu:8", "data-tensor"),
        pytest.param(TPU, "v5p-slice", marks=pytest.mark.tpu_compile),
        pytest.param(
            TPU, "data-tensor-batch-attention", marks=[pytest.mark.tpu_compile, pytest.mark.slow]
        ),
    ],
)
def test_scanned_layers_work_in_place_on_their_piece_of_the_cache(target, layout):
    """Temporaries also hold the current layer's cache, a small part of forty layers."""
    config = changed(CONFIG, windows=alike(CONFIG).windows * 20)
    decode = compiled_decode(target, layout, config, scan_layers=True)
    assert decode.overwritten >= decode.cache
    assert decode.temporaries <= 0.05 * decode.cache + 6 * decode.logits
    assert max(one.num_bytes for one in decode.collectives) < decode.logits
