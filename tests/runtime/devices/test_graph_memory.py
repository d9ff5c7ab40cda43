"""Graphs that need more memory than a device has are refused before rows run."""

import os
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from tiny import GRID, TinyModel

from noria.compile.graph_failures import GraphFailed
from noria.runtime.devices import graph_memory, machine
from noria.runtime.devices.graph_memory import check_memory, required_bytes
from noria.runtime.devices.machine import host_bytes

FEW_GRAPHS = replace(GRID, prefill=((16, 2), (48, 1)), score=False)


def device(stats, process_index: int = 0, platform: str = "gpu"):
    return SimpleNamespace(
        process_index=process_index, platform=platform, memory_stats=lambda: stats
    )


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


def test_devices_of_the_cpu_share_the_memory_of_the_machine(monkeypatch):
    graphs, on_cpu = TinyModel(grid=FEW_GRAPHS).graphs, partial(device, None, platform="cpu")
    most = max(map(required_bytes, graphs.executables.values()))
    for count in (1, 3):
        monkeypatch.setattr(graph_memory, "host_bytes", lambda limit=count * most: limit)
        check_memory(graphs, [on_cpu()] * count)
        monkeypatch.setattr(graph_memory, "host_bytes", lambda limit=count * most: limit - 1)
        with pytest.raises(GraphFailed, match="the memory of this machine") as caught:
            check_memory(graphs, [on_cpu()] * count)
        assert f"got {count * most / 1e9:.2f} GB, with weights and cache" in str(caught.value)


def test_the_memory_of_a_process_is_the_smallest_of_its_limits(monkeypatch, tmp_path):
    whole = host_bytes()
    assert 0 < whole <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for text, wanted in (("max\n", whole), (f"{10**9}\n", min(10**9, whole))):
        (tmp_path / "memory.max").write_text(text)
        monkeypatch.setattr(machine, "_CGROUP_LIMIT", tmp_path / "memory.max")
        assert host_bytes() == wanted
    limits = SimpleNamespace(RLIMIT_AS=0, RLIM_INFINITY=-1, getrlimit=lambda which: (5 * 10**8, -1))
    monkeypatch.setattr(machine, "resource", limits)
    assert host_bytes() == 5 * 10**8
