"""Graphs that save too little are left out."""

from collections import Counter
from dataclasses import replace

import pytest
from planning_models import PLAIN, work_of

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.default_grid import derive_grid
from noria.compile.grids.prefill_ladder import prefill_padding
from noria.compile.grids.row_shape import RowShape
from noria.compile.hardware.hardware import Hardware
from noria.compile.planning.compile_time import NO_TIME, GraphSeconds
from noria.compile.planning.cost import CostModel
from noria.compile.planning.graph_prices import GraphPrices
from noria.runtime.files.hardware_files import known_hardware
from noria.sharding.call import Call

HARDWARE = Hardware("mine", "made up", {"float32": 1e9}, 1e9, 1e8, 1e7, [])
WORK = work_of(PLAIN)
CPU = replace(HARDWARE, name="cpu")


def prices(build: float) -> GraphPrices:
    return GraphPrices(CostModel(WORK, HARDWARE), GraphSeconds(build, build))


@pytest.mark.parametrize("build", [0.0, 0.1, 0.5, 2.0, 100.0])
def test_a_prefill_length_saves_what_it_takes_at_least(build):
    """Without a length, its prompts are padded to the next length."""
    lengths = [20] * 30 + [100] * 4 + [200] * 8
    found = prices(build)
    grid = derive_grid([RowShape(n, 4) for n in lengths], 256, prices=found)

    def seconds(buckets) -> float:
        rows = Counter(next(b for b in buckets if n <= b.length) for n in lengths)
        return sum(-(-n // b.batch) * found.cost.seconds(b.call()) for b, n in rows.items())

    for bucket in grid.prefill[:-1]:
        others = tuple(one for one in grid.prefill if one != bucket)
        assert seconds(others) - seconds(grid.prefill) >= found.of_prefill_bucket(1) * (1 - 1e-9)
    assert grid.prefill[-1].length >= max(lengths)


def test_dearer_graphs_are_fewer_and_pad_more():
    rows = [RowShape(n, 4) for n in range(8, 250, 3)]
    grids = [derive_grid(rows, 256, prices=prices(build)) for build in (0, 1, 1e9)]
    counts = [len(grid.prefill) for grid in grids]
    assert counts[0] > counts[1] > counts[2] == 1
    lengths = [row.prompt_length for row in rows]
    padded = [prefill_padding(lengths, grid.prefill)[1] for grid in grids]
    assert padded[0] < padded[1] < padded[2]


def test_scores_double_the_price_of_a_length_and_first_calls_are_part_of_it():
    call = Call("prefill", 1, 1, 1)
    first = CostModel(WORK, CPU).first_call_seconds(call)
    assert first > 0 == CostModel(WORK, HARDWARE).first_call_seconds(call)
    built = GraphPrices(CostModel(WORK, CPU), GraphSeconds(3.0, 5.0, per_entry=0.5))
    assert built.of_prefill_bucket(2) == 2 * (3 + first)
    grid = BucketGrid(16, ((16, 1),), 4, pages=4, page=16)
    assert built.of_decode_graph(grid) == 5 + 32 + first
    assert GraphPrices(CostModel(WORK, CPU), NO_TIME).of_decode_graph(grid) == first


@pytest.mark.parametrize("target", ["cpu", "cpu:8", "gpu", "tpu:v5e:2x2"])
def test_prices_are_of_the_platform_and_bfloat16_counts_as_float32_on_a_cpu(target):
    call, known = Call("prefill", 64, 512, 512), known_hardware()
    of_dtype = [
        GraphPrices.of_target(target, work_of(PLAIN, dtype=dtype), known)
        for dtype in ("float32", "bfloat16")
    ]
    assert GraphPrices.of_target(target, WORK, known).build == of_dtype[0].build
    rates = [found.cost.hardware.peak(found.cost.work.dtype) for found in of_dtype]
    assert (rates[0] == rates[1]) == target.startswith("cpu")
    assert all(found.cost.seconds(call) > 0 for found in of_dtype)
