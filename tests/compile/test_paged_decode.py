"""Graphs with a cache in pages, compiled for absent devices: they move few dead bytes.

The pages that rows may hold at most count as read, as the kernels declare. No call copies the pool
or gathers the cache of a row, and no loop of a step runs over slots outside of the kernel.
"""

import re
from dataclasses import replace
from importlib.util import find_spec

import jax.numpy as jnp
import pytest
from layers_of_8b import LAYERS_OF_8B

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import compile_with_text, plan_graphs
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.planning.work import Work
from noria.compile.programs.hbm_bytes import hbm_bytes
from noria.compile.targets import find_target

GRID = BucketGrid(2048, ((2048, 128, 16),), 128, (2048,), pages=2048, page=64)
MOST_BYTES = 1.15
"""The most bytes that a step may move, as a multiple of those that it needs."""
MOST_BYTES_OF_TILES = 1.5
"""The same for a call of tiles, which moves activations, too; a copy of the keys of a layer is a
sixth of what it needs."""


def compiled(kind: str, target_name: str, repeats: int = 1):
    """Return the model, the executable and the text of a graph for one device."""
    target = find_target(target_name)
    placement = replace(target, devices=target.devices[:1]).placement()
    config = replace(LAYERS_OF_8B, layers=LAYERS_OF_8B.layers * repeats)
    model, dtype = AbstractModel(config, placement.arrangement(config)), "bfloat16"
    graphs = plan_graphs(model, GRID, placement, jnp.dtype(dtype))
    (graph,) = (graph for graph in graphs if graph.key.kind == kind)
    return model, *compile_with_text(graph)[:2]


ON_TPU = pytest.mark.tpu_compile
ON_GPU = (
    pytest.mark.gpu_compile,
    pytest.mark.skipif(
        find_spec("jax_cuda12_plugin") is None or find_spec("nvidia") is None,
        reason="needs jax-cuda12-plugin and nvidia-cuda-nvcc-cu12",
    ),
)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("tpu:v5e:1x1", marks=ON_TPU),
        pytest.param("tpu:v6e:1x1", marks=(ON_TPU, pytest.mark.slow)),
        pytest.param("tpu:v5p:1x1x1", marks=(ON_TPU, pytest.mark.slow)),
        pytest.param("gpu:h100:1", marks=ON_GPU),
    ],
)
def test_a_decode_step_moves_little_more_than_it_needs(target):
    # on a GPU, the choice of tokens moves about as much as two layers
    repeats = 3 if target.startswith("gpu") else 1
    model, executable, text = compiled("decode", target, repeats)
    needed = Work(model, "bfloat16").needed(GRID.decode_call(2048)).total
    moved = hbm_bytes(text)
    assert 0.9 * needed < moved <= MOST_BYTES * needed
    pool = GRID.pages * GRID.page * 8 * 128 * 2
    assert executable.memory_analysis().temp_size_in_bytes < pool / 4
    # sampling has loops, in branches that run if a row asks for them
    loops = re.findall(r' while\(.*op_name="([^"]*)"', text)
    assert len([name for name in loops if "/cond/" not in name]) == 1


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("tpu:v5e:1x1", marks=(ON_TPU, pytest.mark.slow)),
        pytest.param("gpu:h100:1", marks=ON_GPU),
    ],
)
def test_a_call_of_128_tiles_copies_no_pages(target):
    model, executable, text = compiled("prefill", target)
    assert len(re.findall(r' custom_call_target="(?:tpu_custom_call|mosaic_gpu_v2)"', text)) == 2
    needed = Work(model, "bfloat16").needed(GRID.prefill_call(GRID.prefill[0])).total

    assert 0.9 * needed < hbm_bytes(text) <= MOST_BYTES_OF_TILES * needed
    assert re.findall(r' while\(.*op_name="([^"]*)"', text) == []
    pool = GRID.pages * GRID.page * 8 * 128 * 2
    assert executable.memory_analysis().temp_size_in_bytes < 1.1 * pool
