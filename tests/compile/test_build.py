"""The build: its progress by graph, and its end without more graphs after a failure or Ctrl-C."""

import time

import jax.numpy as jnp
import pytest
from tiny import CONFIG, GRID

from noria.compile import build as module
from noria.compile.abstract_model import AbstractModel
from noria.compile.targets import find_target


class BrokenGraph(Exception):
    pass


def test_after_a_failure_the_graphs_that_wait_are_not_begun(monkeypatch):
    begun = []

    def fail_first(graph):
        begun.append(graph.name)
        if len(begun) == 1:
            raise BrokenGraph
        time.sleep(0.5)  # long enough for the failure to reach the caller

    monkeypatch.setattr(module.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(module, "compile_graph", fail_first)
    placement = find_target("cpu").placement()
    with pytest.raises(BrokenGraph):
        module.build(AbstractModel(CONFIG), GRID, placement, jnp.float32)
    planned = module.plan_graphs(AbstractModel(CONFIG), GRID, placement, jnp.dtype(jnp.float32))
    assert len(begun) < len(planned) / 2


def test_what_is_left_is_predicted_from_what_is_done(monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(module, "compile_graph", lambda graph: (None, 4.1))
    said = []
    module.build(
        AbstractModel(CONFIG), GRID, find_target("cpu").placement(), jnp.float32, said.append
    )
    total = len(said)
    # a graph is done every ten seconds
    assert [built.remaining_seconds for built in said] == [10 * n for n in range(total)][::-1]
    name, left = said[0].name, 10 * (total - 1)
    assert str(said[0]).startswith(f"compile [1/{total}] {name}  4.1 s")
    assert str(said[0]).endswith(f", about {left} s left")
    assert "left" not in str(said[-1])


def test_graphs_that_are_ready_are_not_compiled_and_new_ones_are_handed_over(monkeypatch):
    begun, kept = [], {}

    def compile_graph(graph):
        begun.append(graph.name)
        return f"compiled {graph.name}", 0.0

    monkeypatch.setattr(module, "compile_graph", compile_graph)
    ready = {"empty state": "ready", "fork": "ready"}
    graphs = module.build(
        AbstractModel(CONFIG),
        GRID,
        find_target("cpu").placement(),
        jnp.float32,
        ready=ready,
        keep=kept.__setitem__,
    )
    assert not ready.keys() & set(begun) and begun
    assert kept == {name: f"compiled {name}" for name in begun}
    assert graphs.executables == ready | kept
