"""A grid without decode slots gives the same scores as a grid with slots, also under layouts."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from laid_out import LaidOut, config_of, greedy_rows, layout_of
from unoptimized import set_optimized

from noria.compile.abstract_model import model_sizes
from noria.compile.grids.bucket_grid import BucketGrid
from noria.sharding.legality import check


@dataclass
class Scoring(LaidOut):
    """A model that scores, with or without slots, with the same prefill buckets."""

    has_slots: bool = True

    @property
    def grid(self) -> BucketGrid:
        grid = super().grid
        if self.has_slots:
            return grid
        return BucketGrid(grid.max_length, grid.prefill, decode_slots=0, score=True)


@pytest.fixture(autouse=True)
def _optimizations(request: pytest.FixtureRequest, optimizes: bool) -> None:
    """Optimize the programs of one device in every run, and all programs with `--slow`."""
    set_optimized(optimizes or request.node.callspec.params["layout"] is None)


@pytest.mark.parametrize(
    ("family", "layout", "scan_layers"),
    [
        ("gpt_oss", None, False),
        ("deepseek_v3", None, False),
        pytest.param("gemma3_text", None, True, marks=pytest.mark.slow),
        ("llama", "data-tensor-batch-attention@data=2,tensor=2", False),
        pytest.param("mixtral", "expert-parallel", False, marks=pytest.mark.slow),
        ("gemma2", "ring-tensor", True),
    ],
)
def test_scores_are_the_same_bits(family, layout, scan_layers):
    """Cases have windows, latents, experts and scanned layers; devices split rows or experts."""
    config, placed = config_of(family), None if layout is None else layout_of(layout)
    found = []
    for has_slots in (True, False):
        laid = Scoring(config, placed, scan_layers=scan_layers, has_slots=has_slots)
        if placed is not None:
            assert not check(placed, model_sizes(config, laid.num_devices, laid.grid))
        found.append(laid.score(greedy_rows(), 3))
    for ours, theirs in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_array_equal(ours, theirs)
