"""A chunk graph works in place: it copies the slots that it reads, and nothing else."""

from dataclasses import replace

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


def chunk_graph(
    target: str, slots: int, dtype: str, config: DecoderConfig = CONFIG
) -> GraphToBuild:
    """The graph of the longest span."""
    grid = BucketGrid(2048, ((1024, 2, 128), (2048, 2, 128)), slots, (1024, 2048))
    placement = find_target(target).placement()
    graphs = plan_graphs(Definition(config), grid, placement, jnp.dtype(dtype))
    return next(graph for graph in graphs if graph.name == "chunk 128x2 span 2048")


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


def test_what_a_chunk_needs_does_not_grow_with_the_layers():
    """Slots of a layer are read when it is their turn."""
    few, many = (
        temporaries(chunk_graph("cpu", 4, "float32", replace(CONFIG, windows=(None,) * layers)))
        for layers in (3, 9)
    )
    assert many < 1.1 * few


def test_the_first_chunk_of_a_prompt_attends_to_itself_alone():
    """A span of one chunk is as much work as a whole prompt of that length."""
    definition = Definition(replace(CONFIG, windows=(None,) * 3))
    chunks = BucketGrid(128, ((128, 2, 128),), 2, (128,))
    prompts = BucketGrid(128, ((128, 2),), 2, (128,))
    placement = find_target("cpu").placement()

    def flops(grid: BucketGrid, phase: str) -> float:
        graphs = plan_graphs(definition, grid, placement, jnp.dtype("float32"))
        graph = next(graph for graph in graphs if graph.name.startswith(phase))
        return compile_graph(graph)[0].cost_analysis()["flops"]

    assert flops(chunks, "chunk") < 1.01 * flops(prompts, "prefill")


@pytest.mark.tpu_compile
def test_a_chunk_needs_little_beside_its_arguments_on_tpu():
    graph = chunk_graph("tpu:v5e:2x4", 64, "bfloat16")
    assert temporaries(graph) < 0.05 * sum(segments(graph))
