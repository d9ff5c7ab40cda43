"""The padding that a job reports, and what its rows share, for whole prompts and for chunks."""

from dataclasses import replace

import pytest
from related_prompts import table_of

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.row_shape import RowShape
from noria.compile.grids.structured_grid import StructuredGrid
from noria.compile.plan import Numbers, Plan, PlannedModel
from noria.runtime.batch import plan_report
from noria.runtime.batch.batch_model import is_served
from noria.runtime.batch.plan_report import padding_note, sharing_note
from noria.runtime.rows.scan import RowRequirements


def rows_of(lengths) -> list[RowShape]:
    return [RowShape(length, 8) for length in lengths]


def plan_of(grid: BucketGrid) -> Plan:
    return Plan("cpu", PlannedModel("m", ""), Numbers("float32"), grid)


def test_rows_that_need_one_chunk_more_than_the_grid_has_count_too():
    grid = BucketGrid(464, ((400, 1),), 4)
    note = padding_note(rows_of([100, 300, 399]), plan_of(grid), max_position=2048)
    whole, _, chunks = note.removeprefix("prefill: ").partition("; ")
    assert whole == "799 tokens in 3 rows, 1200 computed in whole prompts, 33.4% padding"
    # five pieces in calls of two
    assert chunks.startswith("799 tokens in 3 rows, 1536 computed in chunks of 256")


def test_rows_of_calls_without_a_prompt_count_as_padding(monkeypatch):
    """Four pieces take two calls of three; the calls of a large job are taken as full."""
    plan = plan_of(BucketGrid(240, ((240, 3, 48),), 5))
    rows = rows_of([40, 48, 60])
    note = padding_note(rows, plan, max_position=2048)
    assert note.startswith("prefill: 148 tokens in 3 rows, 288 computed in chunks of 48")
    monkeypatch.setattr(plan_report, "MAX_SIMULATED", 2)
    note = padding_note(rows, plan, max_position=2048)
    assert note.startswith("prefill: 148 tokens in 3 rows, 192 computed in chunks of 48")


def test_a_plan_of_chunks_is_compared_with_whole_prompts():
    grid = BucketGrid(512, ((512, 1, 128),), 4)
    note = padding_note(rows_of([100, 300]), plan_of(grid), max_position=2048)
    assert "400 tokens in 2 rows, 512 computed in chunks of 128" in note
    assert "computed in whole prompts" in note.partition("; ")[2]


def test_rows_that_do_not_fit_a_plan_share_nothing():
    """The last row is too long, and the one before it asks for too much."""
    prompts = [[5] * 32 + [row] * 8 for row in range(6, 9)] + [[5] * 32 + [9] * 68]
    rows = [RowShape(len(prompt), 8) for prompt in prompts]
    rows[2] = RowShape(40, 60)
    table, _ = table_of(prompts)
    note = sharing_note(rows, table, BucketGrid(64, ((64, 1, 16),), 4))
    assert note == "prompts that begin alike: 32 of 80 tokens can be copied"


@pytest.mark.parametrize(("max_tokens", "shortest"), [(8, 9), (None, 25)])
def test_rows_without_room_for_an_answer_of_their_form_share_nothing(max_tokens, shortest):
    prompts = [[5] * 32 + [row] * 8 for row in range(6, 9)]
    rows = [RowShape(40, max_tokens, min_output=shortest - 1) for _ in prompts]
    rows[2] = replace(rows[2], min_output=shortest)
    table, _ = table_of(prompts)
    note = sharing_note(rows, table, BucketGrid(64, ((64, 1, 16),), 4))
    assert note == "prompts that begin alike: 32 of 80 tokens can be copied"


def test_rows_that_a_plan_has_no_graphs_for_are_known():
    known, other = (f"sha256:{digit * 64}" for digit in "ab")
    form = StructuredGrid(2, 1, 1, 1, 1, (known,))
    for structured, score, served in (
        (None, False, [0]),
        (form, False, [0, 1]),
        (form, True, [0, 1, 3]),
    ):
        grid = BucketGrid(64, ((64, 1),), 4, score=score, structured=structured)
        plan = Plan("cpu", PlannedModel("tiny", ""), Numbers("float32"), grid)
        rows = [
            RowRequirements(8, 8, 1, scores, structure=form)
            for form, scores in ((None, None), (known, None), (other, None), (None, 0))
        ]
        assert [i for i, row in enumerate(rows) if is_served(row, plan)] == served
