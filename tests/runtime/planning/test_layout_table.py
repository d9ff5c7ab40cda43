"""Ranked layouts on the terminal: the table, and the sentence about the first two."""

from typing import Any

from noria.runtime.planning.layout_table import compared, ranked_lines


def layout(rank: int | None, seconds: float, causes: dict[str, float], **more) -> dict[str, Any]:
    return {
        "rank": rank,
        "name": f"layout-{rank}",
        "mesh": {"data": 2, "tensor": 4},
        "seconds": seconds,
        "bound": 0.9 * seconds,
        "run_seconds": sum(causes.values()),
        "build_seconds": seconds - sum(causes.values()),
        "seconds_by_cause": causes,
        "memory_bytes": {"weights": 8e9, "cache": 4e9, "working": 1e9},
        "prefill_padding": 0.01,
        "idle_slots": 0.02,
        "compiled_seconds": None,
        **more,
    }


FIRST = layout(1, 100.0, {"weights": 40.0, "all-gather along data": 30.0, "cache": 20.0})
SECOND = layout(2, 125.0, {"weights": 70.0, "cache": 20.0, "all-reduce along tensor": 25.0})


def test_the_sentence_has_the_largest_differences_in_both_directions():
    assert compared(FIRST, SECOND) == (
        "layout-1 (data=2, tensor=4) takes 25.0 s (20.0%) less than layout-2 (data=2, tensor=4): "
        "30.0 s less for weights and 25.0 s less for all-reduce along tensor, but 30.0 s more for "
        "all-gather along data"
    )


def test_a_faster_build_is_a_reason_too():
    slow = layout(2, 120.0, FIRST["seconds_by_cause"])
    assert compared(FIRST, slow).endswith(
        "20.0 s (16.7%) less than layout-2 (data=2, tensor=4): 20.0 s less for compiling"
    )


def test_layouts_of_the_same_seconds_are_said_to_be_equal():
    assert compared(FIRST, {**FIRST, "name": "twin"}) == (
        "layout-1 (data=2, tensor=4) and twin (data=2, tensor=4) take the same time, 100.0 s"
    )


def test_compiled_graphs_decide_if_both_were_compiled():
    text = compared({**FIRST, "compiled_seconds": 150.0}, {**SECOND, "compiled_seconds": 200.0})
    assert "takes 50.0 s (25.0%) less than" in text and "by their compiled graphs" in text


def test_the_table_has_a_line_for_each_layout_and_counts_the_refused_ones():
    refused = {"rank": None, "name": "layout-3", "mesh": {}, "findings": ["too large"]}
    header, *rows, _, why, last = ranked_lines([FIRST, SECOND, refused])
    assert [row.split("  ")[0] for row in rows] == [
        "layout-1 (data=2, tensor=4)", "layout-2 (data=2, tensor=4)",
    ]  # fmt: skip
    cells = ["100.0", "90.0", "10", "13.0", "1.0%", "2.0%"]
    assert rows[0].split(")")[1].split()[:6] == cells
    assert rows[0].endswith("weights 40, all-gather along data 30, cache 20")
    assert header.rstrip().endswith("seconds of the run by cause")
    assert why.startswith("why        layout-1")
    assert last == "refused    1 layout that cannot serve this workload"
