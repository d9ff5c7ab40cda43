"""Errors keep all that they say when they are sent from a worker process to its parent."""

import pickle

import pytest

from noria.compile.graph_failures import GraphFailed
from noria.compile.graphs.graph_kinds import GraphKey
from noria.compile.grids.default_grid import ladder_grid
from noria.runtime.errors import EXIT_BUILD, JobError, OtherConfiguration, RowError
from noria.runtime.files.layout_files import read_layout_table
from noria.sharding.layout import Layout
from noria.sharding.legality import IllegalLayout


@pytest.mark.parametrize(
    "error",
    [
        JobError("The graph does not compile.", EXIT_BUILD),
        OtherConfiguration("The journal is of another job.", {"rows": "part 0 of 1"}),
        RowError("invalid_request", "n: expected an integer, got 'x'.", "n"),
        GraphFailed(GraphKey("decode"), ladder_grid(64, 2, score=False), "does not compile"),
        IllegalLayout(Layout.from_table(read_layout_table("data-tensor")), ["one", "two"]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_are_pickled_whole(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))
