"""The build: its progress by graph, and its end without more graphs after a failure or Ctrl-C."""

import time

import jax.numpy as jnp
import pytest
from tiny import CONFIG, GRID

from noria.compile import build as module
from noria.compile.abstract_model import AbstractModel
from noria.compile.graphs.graph_kinds import EMPTY_STATE, FORK
from noria.compile.targets import find_target


class BrokenGraph(Exception):
    pass


@pytest.fixture
def planned() -> list[module.GraphSpec]:
    placement = find_target("cpu").placement()
    return module.plan_graphs(AbstractModel(CONFIG), GRID, placement, jnp.dtype(jnp.float32))


def test_after_a_failure_the_graphs_that_wait_are_not_begun(planned, monkeypatch):
    begun = []

    def fail_first(graph):
        begun.append(graph.key)
        if len(begun) == 1:
            raise BrokenGraph
        time.sleep(0.5)  # long enough for the failure to reach the caller

    monkeypatch.setattr(module.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(module, "compile_graph", fail_first)
    with pytest.raises(BrokenGraph):
        module.build(GRID, planned)
    assert len(begun) < len(planned) / 2


def test_what_is_left_is_predicted_from_what_is_done(planned, monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(module, "compile_graph", lambda graph: (None, 4.1))
    said = []
    module.build(GRID, planned, said.append)
    total = len(said)
    # a graph is done every ten seconds
    assert [built.remaining_seconds for built in said] == [10 * n for n in range(total)][::-1]
    key, left = said[0].key, 10 * (total - 1)
    assert str(said[0]).startswith(f"compile [1/{total}] {key}  4.1 s")
    assert str(said[0]).endswith(f", about {left} s left")
    assert "left" not in str(said[-1])


def test_graphs_that_are_ready_are_not_compiled_and_new_ones_are_handed_over(planned, monkeypatch):
    begun, kept = [], {}

    def compile_graph(graph):
        begun.append(graph.key)
        return f"compiled {graph.key}", 0.0

    monkeypatch.setattr(module, "compile_graph", compile_graph)
    ready = {EMPTY_STATE: "ready", FORK: "ready"}
    graphs = module.build(GRID, planned, ready=ready, keep=kept.__setitem__)
    assert not ready.keys() & set(begun) and begun
    assert kept == {key: f"compiled {key}" for key in begun}
    assert graphs.executables == ready | kept
