"""The build: a failure, as Ctrl-C, ends it without the graphs that are not begun."""

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
