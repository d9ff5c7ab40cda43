"""A token is written into its page without a loop over slots, in programs compiled for TPU.

XLA for TPU runs a scatter of an unknown form as a loop with an iteration for every slot, of a few
bytes each, for keys and values of every layer: it would take nine tenths of a step.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from alike import alike, changed

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import GraphSpec, compile_with_text, plan_graphs
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.programs.report import ProgramReport, read_report
from noria.compile.targets import find_target
from noria.modelzoo.config import DecoderConfig
from noria.modelzoo.latent_config import LatentAttention
from noria.runtime.files.layout_files import read_layout_table
from noria.sharding.layout import Layout

ONE_CHIP, TPU = "tpu:v5e:1x1", "tpu:v5e:2x4"
SLOTS, ROWS, LAYERS = 32, 2, 4
LEAST_TURN = 64 * 1024
"""The least bytes that each iteration of a loop must move."""
GRID = BucketGrid(512, ((256, ROWS),), SLOTS, row_tokens=1)
"""Layers with windows have pages of each slot."""
CHUNKS = replace(GRID, prefill=((512, ROWS, 128),), row_tokens=128)
CONFIG = DecoderConfig.alike(
    vocab_size=128,
    embed=1024,
    mlp=1024,
    num_query_heads=8,
    num_kv_heads=8,
    head_dim=128,
    windows=(None,) * LAYERS,
    max_position=512,
)
WINDOWS = changed(CONFIG, windows=(96, None) * (LAYERS // 2))
NARROW = changed(CONFIG, head_dim=64)
LATENTS = changed(CONFIG, latent=LatentAttention(512, 128, 64, 128), head_dim=192)
ONE_HEAD = "weight-stationary-1d@tensor=8"
SOME_SLOTS = "data-tensor@data=4,tensor=2"
IN_CODES = replace(GRID, page=128)
CASES = {
    "pages": (CONFIG, GRID, None, None),
    "windows": (WINDOWS, GRID, None, None),
    "narrow heads": (NARROW, GRID, None, None),
    "latents": (LATENTS, GRID, None, None),
    "one head a device": (CONFIG, GRID, ONE_HEAD, None),
    "some slots a device": (WINDOWS, replace(GRID, slot_groups=4), SOME_SLOTS, None),
    "int4": (WINDOWS, IN_CODES, None, "int4"),
    "latents in int8": (LATENTS, IN_CODES, None, "int8"),
}  # fmt: skip
MET_BY_OTHERS = {
    ("pages", False),
    ("windows", True),
    ("narrow heads", False),
    ("some slots a device", False),
    ("int4", False),
    ("latents in int8", False),
}
"""Cases whose layers, layout and loop meet in other cases, two by two."""


def graph_of(
    kind: str,
    config: DecoderConfig,
    grid: BucketGrid,
    layout: str | None,
    scan_layers: bool,
    codes: str | None = None,
) -> GraphSpec:
    """Return the decode graph or the prefill graph."""
    by = None if layout is None else Layout.from_table(read_layout_table(layout))
    placement = find_target(ONE_CHIP if by is None else TPU).placement(by)
    # without a loop, one layer of each kind shows what the others do
    config = config if scan_layers else config.first_layers(2)
    definition = AbstractModel(config, placement.arrangement(config, scan_layers, codes))
    graphs = plan_graphs(definition, grid, placement, jnp.dtype("bfloat16"))
    (graph,) = (graph for graph in graphs if graph.key.kind == kind)
    return graph


def report_of(graph: GraphSpec) -> ProgramReport:
    _, text, _ = compile_with_text(graph)
    assert text is not None
    return read_report(text, "tpu", jax.tree.leaves(graph.arguments)[0].sharding.mesh.shape)


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("case", "scan_layers"),
    [
        pytest.param(
            case, scan_layers, id=f"{case}-{'scanned' if scan_layers else 'unrolled'}",
            marks=[pytest.mark.slow] * ((case, scan_layers) in MET_BY_OTHERS),
        )
        for case in CASES
        for scan_layers in (False, True)
    ],
)  # fmt: skip
def test_a_decode_step_has_no_loop_but_that_over_layers(case, scan_layers):
    config, grid, layout, codes = CASES[case]
    found = report_of(graph_of("decode", config, grid, layout, scan_layers, codes))
    repeats = LAYERS // len(set(alike(config).windows)) if scan_layers else 0
    assert found.step.loop_turns == repeats
    assert all(loop.bytes_a_turn >= LEAST_TURN for loop in found.loops)
    assert found.step.copied_bytes == found.once.copied_bytes == 0


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("config", "grid", "scan_layers"),
    [
        pytest.param(WINDOWS, GRID, False, id="heads-whole-unrolled"),
        pytest.param(WINDOWS, CHUNKS, True, id="heads-chunks-scanned"),
        pytest.param(LATENTS, GRID, True, id="latents-whole-scanned"),
        pytest.param(LATENTS, CHUNKS, False, id="latents-chunks-unrolled"),
        pytest.param(WINDOWS, GRID, True, id="heads-whole-scanned", marks=pytest.mark.slow),
        pytest.param(WINDOWS, CHUNKS, False, id="heads-chunks-unrolled", marks=pytest.mark.slow),
        pytest.param(LATENTS, GRID, False, id="latents-whole-unrolled", marks=pytest.mark.slow),
        pytest.param(LATENTS, CHUNKS, True, id="latents-chunks-scanned", marks=pytest.mark.slow),
    ],
)
def test_a_prefill_call_writes_its_rows_at_once_or_one_by_one(config, grid, scan_layers):
    """No loop runs over tokens. Every two of the facts meet in every run."""
    found = report_of(graph_of("prefill", config, grid, None, scan_layers))
    assert all(
        loop.turns in (ROWS, LAYERS // len(set(alike(config).windows))) for loop in found.loops
    )
