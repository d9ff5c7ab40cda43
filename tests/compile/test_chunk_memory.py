"""A chunk graph works in place: it copies the slots that it reads, and nothing else."""

import jax
import jax.numpy as jnp
import pytest

from noria.compile.bucket_grid import BucketGrid
from noria.compile.build import GraphToBuild, compile_graph, plan_graphs
from noria.compile.definition import Definition
from noria.compile.targets import find_target
from noria.modelzoo.config import DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=512,
    embed=64,
    mlp=128,
    num_query_heads=6,
    num_kv_heads=3,
    head_dim=64,
    windows=(None, 96, None),
    max_position=8192,
)


def chunk_graph(target: str, slots: int, dtype: str) -> GraphToBuild:
    """The graph of the longest span."""
    grid = BucketGrid(2048, ((1024, 2), (2048, 2)), slots, (1024, 2048), chunk=128)
    placement = find_target(target).placement()
    graphs = plan_graphs(Definition(CONFIG), grid, placement, jnp.dtype(dtype))
    return next(graph for graph in graphs if graph.name.startswith("chunk span 2048"))


def temporaries(graph: GraphToBuild) -> int:
    compiled, _, _ = compile_graph(graph)
    return compiled.memory_analysis().temp_size_in_bytes


def segments(graph: GraphToBuild) -> list[int]:
    """Bytes of each array of keys or values."""
    cache = graph.arguments[1].cache
    return [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.layers)]


def test_what_a_chunk_needs_does_not_grow_with_the_slots():
    few, many = (chunk_graph("cpu", slots, "float32") for slots in (64, 128))
    assert temporaries(many) - temporaries(few) < min(segments(few))


@pytest.mark.tpu_compile
def test_a_chunk_needs_little_beside_its_arguments_on_tpu():
    graph = chunk_graph("tpu:v5e:2x4", 64, "bfloat16")
    assert temporaries(graph) < 0.05 * sum(segments(graph))
