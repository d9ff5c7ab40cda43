"""Compiles are counted, and named with the argument that differs."""

import logging

import jax
import jax.numpy as jnp
import numpy as np

from noria.compile.monitor import compile_monitor


def test_a_program_that_compiles_again_is_named_with_the_argument_that_differs():
    monitor = compile_monitor()
    assert compile_monitor() is monitor

    @jax.jit
    def turn_wheel(x, y):
        return x + y

    small, large = np.ones(3, np.float32), np.ones(4, np.float32)
    before = monitor.num_compiles
    for x in (small, small, large):
        turn_wheel(x, np.float32(1))
    found = monitor.compiles[before:]
    assert found == [
        "jit(turn_wheel): compiled for the first time, with float32[3], float32[]",
        "jit(turn_wheel): argument 0 is float32[4], was float32[3]",
    ]


def test_an_eager_operation_is_named(caplog):
    monitor = compile_monitor()
    before = monitor.num_compiles
    with caplog.at_level(logging.DEBUG):
        jnp.arange(17).reshape(17, 1)
    assert any("iota" in text or "reshape" in text for text in monitor.compiles[before:])
    # the messages of jax that a user has not asked for stay away
    assert not [record for record in caplog.records if record.msg.startswith("Compiling")]
