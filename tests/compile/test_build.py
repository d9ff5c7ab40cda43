"""The build: what it says as graphs are done; a failure, as Ctrl-C, ends it without the others."""

import time

import jax.numpy as jnp
import pytest
from tiny import CONFIG, GRID

from noria.compile import build as module
from noria.compile.definition import Definition
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
        module.build(Definition(CONFIG), GRID, placement, jnp.float32)
    planned = module.plan_graphs(Definition(CONFIG), GRID, placement, jnp.dtype(jnp.float32))
    assert len(begun) < len(planned) / 2


def test_what_is_left_is_predicted_from_what_is_done(monkeypatch):
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(module.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(module, "compile_graph", lambda graph: (None, 4.1, graph.donated == ()))
    said = []
    module.build(Definition(CONFIG), GRID, find_target("cpu").placement(), jnp.float32, said.append)
    total = len(said)
    # a graph is done every ten seconds
    assert [built.remaining_seconds for built in said] == [10 * n for n in range(total)][::-1]
    name, left = said[0].name, 10 * (total - 1)
    assert str(said[0]).startswith(f"compile [1/{total}] {name}  4.1 s")
    assert str(said[0]).endswith(f", about {left} s left")
    assert "left" not in str(said[-1])
    assert any(" (cached)" in str(built) for built in said)
