"""Grids of embedding jobs: buckets cut exactly at the lengths of the texts."""

from dataclasses import replace

import numpy as np
import pytest

from noria.compile.grids.adapter_grid import AdapterGrid
from noria.compile.grids.bucket_grid import BucketGrid, NoDecodeSlots
from noria.compile.grids.embed_grid import MAX_GRAPHS, embed_defaults, embed_grid, embed_ladder
from noria.compile.grids.grid_defaults import GridDefaults
from noria.compile.grids.prefill_ladder import prefill_padding

DEFAULTS = embed_defaults(GridDefaults(), length_step=1, tokens_per_call=1024)


def mixed_lengths(count: int) -> list[int]:
    """Return lengths of texts as they are published: many short ones, a long tail."""
    rng = np.random.default_rng(0)
    return np.clip(rng.lognormal(4.2, 0.8, count).astype(int), 4, 512).tolist()


def test_ten_thousand_mixed_texts_have_at_most_five_percent_padding():
    lengths = mixed_lengths(10_000)
    grid = embed_grid(lengths, 512, DEFAULTS)
    real, computed = prefill_padding(lengths, grid.prefill)
    assert computed / real <= 1.05 and len(grid.prefill) <= MAX_GRAPHS
    assert grid.max_length == max(lengths) and not grid.decode_slots


def test_a_short_job_has_one_graph_of_its_rows():
    grid = embed_grid([3, 9, 5], 512, DEFAULTS)
    assert grid.prefill == ((9, 3, None),) and grid.max_length == 9


def test_lengths_on_accelerators_are_whole_steps_up_to_the_context():
    defaults = embed_defaults(GridDefaults(), length_step=16, tokens_per_call=1024)
    assert embed_grid([3, 9, 500], 512, defaults).max_length == 512
    assert embed_grid([3, 9, 508], 510, defaults).max_length == 510


def test_texts_that_are_too_long_do_not_lengthen_the_grid():
    assert embed_grid([3, 9000], 512, DEFAULTS).max_length == 3
    assert embed_grid([9000], 512, DEFAULTS).max_length == 1


def test_batches_divide_as_the_layout_splits_them():
    defaults = replace(DEFAULTS, batch_multiple=4)
    grids = embed_grid(mixed_lengths(300), 512, defaults), embed_ladder(512, defaults)
    assert all(bucket.batch % 4 == 0 for grid in grids for bucket in grid.prefill)


def test_a_ladder_covers_texts_of_unknown_lengths():
    grid = embed_ladder(300, DEFAULTS)
    assert [bucket.length for bucket in grid.prefill] == [18, 37, 75, 150, 300]
    assert all(
        bucket.batch * bucket.length <= DEFAULTS.tokens_per_prefill for bucket in grid.prefill
    )


@pytest.mark.parametrize(("multiple", "lengths"), [(64, [64]), (48, [48, 96]), (24, [24, 48, 96])])
def test_a_ladder_has_each_length_that_a_layout_divides_once(multiple, lengths):
    grid = embed_ladder(lengths[-1], replace(DEFAULTS, length_multiple=multiple))
    assert [bucket.length for bucket in grid.prefill] == lengths


def test_such_a_grid_is_written_and_read_and_refuses_tokens():
    grid = embed_grid([3, 9, 5], 512, DEFAULTS)
    table = {key: value for key, value in grid.to_table().items() if value is not None}
    assert BucketGrid.from_table(table) == grid and table["embed"] is True
    assert grid.fit(4, 0).length == 9
    with pytest.raises(NoDecodeSlots, match="the plan only embeds texts"):
        grid.fit(4, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decode_slots": 2}, "buckets.embed: expected false with decode"),
        ({"adapters": AdapterGrid(1, {"mlp.down": 4})}, "expected none with buckets.embed"),
        ({"score": True}, "buckets.score: .* only embedded, expected false"),
        ({"embed": 1}, "buckets.embed: expected true or false"),
    ],
)
def test_contradictions_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(embed_grid([3, 9, 5], 512, DEFAULTS), **changes)
