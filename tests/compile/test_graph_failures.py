"""Errors of graphs name the graph, the reason and the key of the plan to change."""

from dataclasses import replace

import pytest
from tiny import GRID, TAIL_GRID

from noria.compile.graph_failures import GraphFailed, naming_graph
from noria.compile.graphs.graph_kinds import EMPTY_STATE, FORK, GraphKey, graph_keys
from noria.compile.grids.bucket_grid import BucketGrid


def said(key: GraphKey, grid: BucketGrid = GRID, error: Exception | None = None) -> str:
    with (
        pytest.raises(GraphFailed) as caught,
        naming_graph(key, grid, "does not compile"),
    ):
        raise error or RuntimeError("INTERNAL: no such thing.\na table of buffers")
    assert caught.value.exit_code == 4 and caught.value.key == key
    return str(caught.value)


def test_the_graph_the_first_line_of_the_reason_and_the_change_are_named():
    assert said(GraphKey("prefill", GRID.prefill[1])) == (
        "graph 'prefill 16x2' does not compile: INTERNAL: no such thing. Change the bucket 16x2: "
        "give it fewer rows with --set 'buckets.prefill=[[8, 3], [16, 1], [48, 1]]', or leave it "
        "to the next longer one with --set 'buckets.prefill=[[8, 3], [48, 1]]'."
    )


def test_memory_that_the_host_lacks_has_a_name():
    assert "does not compile: MemoryError. Change" in said(FORK, error=MemoryError())


def test_the_longest_bucket_of_one_row_has_no_other_to_go_to():
    assert "spread the model over more devices, or take shorter rows" in said(
        GraphKey("score", GRID.prefill[-1])
    )


def test_a_graph_of_slots_gets_fewer_of_them():
    (decode,) = (key for key in graph_keys(GRID) if key.kind == "decode")
    for key in (decode, EMPTY_STATE):
        assert "with --set buckets.decode_slots=2" in said(key)


@pytest.mark.parametrize("grid", [GRID, TAIL_GRID])
def test_every_graph_has_advice_that_is_a_plan(grid):
    for key in graph_keys(grid):
        text = said(key, grid)
        if "buckets.prefill=" in text:
            entries = eval(text.split("buckets.prefill=")[1].split("'")[0])
            table = grid.to_table() | {"prefill": entries}
            table = {key: value for key, value in table.items() if value is not None}
            assert BucketGrid.from_table(table) != grid
        else:
            replace(grid, decode_slots=2)


def test_other_errors_pass():
    with pytest.raises(KeyError), naming_graph(FORK, GRID, "does not compile"):
        raise KeyError("a bug")
