"""Refuses devices and models in a child that was forked from the process that has them.

A fork copies one of many threads: locks that jax's other threads hold stay locked in the child,
which would wait for ever. Knows nothing of models.
"""

import os

from .errors import ForkedProcess

_starter: int | None = None


def note_start() -> None:
    """Remember the process that starts jax; raise ForkedProcess in a forked child of it."""
    global _starter
    check()
    _starter = os.getpid()


def check() -> None:
    """Raise ForkedProcess if another process started jax."""
    if _starter not in (None, os.getpid()):
        raise ForkedProcess(
            f"LLM: expected the process that started jax ({_starter}), got one that was forked "
            f"from it ({os.getpid()}), in which jax hangs. Start workers as new processes, with "
            f"multiprocessing.get_context('spawn'), and make the LLM in each of them."
        )
