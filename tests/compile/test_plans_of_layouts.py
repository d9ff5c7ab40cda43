"""Plans and derived grids under layouts: the layout survives the file, the shapes divide."""

import tomllib
from dataclasses import replace

import numpy as np
import pytest

from noria.compile.abstract_model import model_sizes
from noria.compile.grids.bucket_grid import BucketGrid, NoBucketFits
from noria.compile.grids.default_grid import derive_grid, ladder_grid
from noria.compile.grids.grid_defaults import GridDefaults
from noria.compile.grids.row_shape import RowShape
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.modelzoo.config import DecoderConfig
from noria.runtime.files.layout_files import named_layout_tables, read_layout_table
from noria.sharding.layout import Layout
from noria.sharding.legality import check

MODEL = PlannedModel("model", "sha256:00")
GRID = BucketGrid(64, ((16, 8),), 8, page=16, slot_groups=8)
CONFIG = DecoderConfig.alike(
    vocab_size=1000,
    embed=96,
    mlp=192,
    num_query_heads=48,
    num_kv_heads=24,
    head_dim=48,
    windows=(None,),
    max_position=1000,
)
CHUNK = 48
"""A chunk size that all of these layouts can divide."""
SPELLINGS = (
    *named_layout_tables(),
    "data-parallel@data=6",
    "gpu-host@data=3,tensor=2",
    "sequence-parallel@tensor=12",
    "v5e-host@tensor=24",
    "data-tensor-batch-attention@data=3,tensor=4",
    "weight-gathered-all@data=4,tensor=3",
)


def layout_of(spelling: str) -> Layout:
    return Layout.from_table(read_layout_table(spelling))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_plan_with_a_layout_survives_its_file(spelling):
    layout = layout_of(spelling)
    plan = Plan(f"cpu:{layout.mesh.num_devices}", MODEL, Numbers("float32"), GRID, layout)
    assert Plan.from_table(tomllib.loads(plan.to_toml())) == plan


def test_the_layout_of_a_plan_stands_in_it_as_in_a_file():
    plan = Plan("cpu:8", MODEL, Numbers("float32"), GRID, layout_of("data-tensor-batch-attention"))
    _, _, text = plan.to_toml().partition("page = 16\n")
    assert text.splitlines() == [
        "",
        "[mesh]",
        "data = 2",
        "tensor = 4",
        "",
        "[rules]",
        'batch = "data"',
        'query_heads = "tensor"',
        'kv_heads = ""',
        'mlp = "tensor"',
        'vocab = "tensor"',
        "",
        "[decode.rules]",
        'attention_batch = ["data", "tensor"]',
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('mlp = "tensor"', "mlp = 4", r"plan \[rules\] mlp: expected a mesh axis"),
        ("[mesh]", "[meshes]", r"unknown \['meshes'\]"),
        ("[decode.rules]", "[decode.mesh]", r"plan: expected \[decode.rules\] and nothing else"),
        ("max_replicated = 0.05", "max_replicated = 2", "plan max_replicated: expected a share"),
    ],
)
def test_a_plan_with_a_layout_of_another_form_is_refused(old, new, message):
    text = Plan(
        "cpu:8", MODEL, Numbers("float32"), GRID, layout_of("data-tensor-batch-attention")
    ).to_toml()
    assert old in text
    with pytest.raises(ValueError, match=message):
        Plan.from_table(tomllib.loads(text.replace(old, new)))


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_derived_grids_divide_as_the_layout_splits_them(spelling):
    """Grids of random jobs pass the legality checks of their layout."""
    layout = layout_of(spelling)
    whole = GridDefaults.for_layout(layout)
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(1, 900, rng.integers(1, 60)).tolist()
        outputs = rng.integers(1, 100, len(lengths)).tolist()
        rows = [RowShape(*pair) for pair in zip(lengths, outputs, strict=True)]
        slots = int(rng.integers(1, 100))
        length = int(rng.integers(100, 1000))
        for defaults in (whole, replace(whole, chunks=(CHUNK,))):
            for grid in (
                derive_grid(rows, CONFIG.max_position, defaults),
                ladder_grid(length, slots, score=False, defaults=defaults),
            ):
                sizes = model_sizes(CONFIG, layout.mesh.num_devices, grid)
                assert check(layout, sizes) == [], grid


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("longest", [1, 5, 15, 16, 17, 100, 950])
def test_every_prompt_of_a_job_fits_the_grid_that_is_derived_for_it(spelling, longest):
    rows = [RowShape(length, 0, is_scored=True) for length in (longest, -(-longest // 2))]
    grid = derive_grid(rows, CONFIG.max_position, GridDefaults.for_layout(layout_of(spelling)))
    for row in rows:
        assert grid.fit(row.prompt_length, row.max_tokens)


def test_a_prompt_whose_length_no_layout_could_split_is_refused_by_name():
    """Tokens split over 12 devices end at 996 of the model's 1000."""
    defaults = GridDefaults.for_layout(layout_of("sequence-parallel@tensor=12"))
    grid = derive_grid([RowShape(999, 0)], CONFIG.max_position, defaults)
    assert grid.prefill[-1].length == 996
    with pytest.raises(NoBucketFits, match="prefill length 999"):
        grid.fit(999, 0)


def test_replicas_multiply_what_a_grid_aims_for():
    one, four = (GridDefaults.for_layout(layout_of(f"data-parallel@data={n}")) for n in (1, 4))
    assert one == GridDefaults()
    assert four.tokens_per_prefill == 4 * one.tokens_per_prefill
    assert four.max_decode_slots == 4 * one.max_decode_slots
