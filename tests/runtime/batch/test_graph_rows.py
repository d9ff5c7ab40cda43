"""The error of a graph names the rows that need it."""

from tiny import GRID

from noria.compile.graphs.graph_kinds import GraphKey
from noria.runtime.batch.batch_model import describe_rows, needs_graph
from noria.runtime.errors import RowError
from noria.runtime.rows.lines import BadRow
from noria.runtime.rows.scan import RowRequirements, ScannedRow


def row(number: int, length: int, bad: BadRow | None = None) -> ScannedRow:
    need = None if bad else RowRequirements(length, 4, 1, None)
    return ScannedRow(number, number + 1, 0, f"q{number}", "", need, bad)


def test_the_number_and_the_first_rows_are_named():
    bad = BadRow(9, 10, 0, "q9", "", RowError("invalid_json", "no"))
    rows = [*(row(i, 4 if i % 2 else 12) for i in range(9)), row(9, 0, bad)]
    assert describe_rows(GraphKey("prefill", GRID.prefill[1]), GRID, rows) == (
        "5 of 10 rows need it: 'q0' (line 1), 'q2' (line 3), 'q4' (line 5), ...; none has run."
    )
    assert (
        describe_rows(GraphKey("prefill", GRID.prefill[2]), GRID, rows)
        == "0 of 10 rows need it; none has run."
    )


def test_a_row_that_fits_nowhere_needs_nothing():
    assert not needs_graph(GraphKey("decode"), GRID, RowRequirements(100, 4, 1, None))
