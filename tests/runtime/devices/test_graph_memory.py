"""Graphs that need more memory than a device has are refused before rows run."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from tiny import GRID, TinyModel

from noria.compile.graph_failures import GraphFailed
from noria.runtime.devices.graph_memory import check_memory, required_bytes

FEW_GRAPHS = replace(GRID, prefill=((16, 2), (48, 1)), score=False)


def device(stats, process_index: int = 0):
    return SimpleNamespace(process_index=process_index, memory_stats=lambda: stats)


def test_the_graph_its_need_and_what_there_is_are_named():
    graphs = TinyModel(grid=FEW_GRAPHS).graphs
    needs = {key: required_bytes(one) for key, one in graphs.executables.items()}
    most = max(needs.values())
    limits = [{"bytes_limit": most + 9}, {"bytes_limit": most}]
    check_memory(graphs, map(device, limits))
    check_memory(graphs, [device(None), device({"bytes_in_use": 1}), device({"bytes_limit": 1}, 1)])
    with pytest.raises(GraphFailed) as caught:
        check_memory(graphs, map(device, [*limits, {"bytes_limit": most - 1}]))
    assert needs[caught.value.key] == most
    assert f"got {most / 1e9:.2f} GB, with weights and cache" in str(caught.value)
    assert "Change " in str(caught.value) and caught.value.exit_code == 4
    assert graphs.grid == FEW_GRAPHS
