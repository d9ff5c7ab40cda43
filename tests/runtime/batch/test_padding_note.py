"""The padding that a job reports, for whole prompts and for chunks, over all rows."""

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.default_grid import RowShape
from noria.runtime.batch.job_plan import padding_note


def rows_of(lengths) -> list[RowShape]:
    return [RowShape(length, 8) for length in lengths]


def test_rows_that_need_one_chunk_more_than_the_grid_has_count_too():
    grid = BucketGrid(464, ((400, 1),), 4, (464,))
    note = padding_note(rows_of([100, 300, 399]), grid, None, max_position=2048)
    whole, _, chunks = note.removeprefix("prefill: ").partition("; ")
    assert whole == "799 tokens in 3 rows, 1200 computed in whole prompts, 33.4% padding"
    assert chunks.startswith("799 tokens in 3 rows, 1280 computed in chunks of 256")


def test_a_plan_of_chunks_is_compared_with_whole_prompts():
    grid = BucketGrid(512, ((512, 1, 128),), 4, (512,))
    note = padding_note(rows_of([100, 300]), grid, None, max_position=2048)
    assert "400 tokens in 2 rows, 512 computed in chunks of 128" in note
    assert "computed in whole prompts" in note.partition("; ")[2]
