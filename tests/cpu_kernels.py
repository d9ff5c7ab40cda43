"""Marks of tests that need the kernels for the CPU, and a way to load them."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest

from noria.runtime.bundles.cpu_kernels import load_kernels

NEEDS_NUMBA = (
    pytest.mark.cpu_kernels,
    pytest.mark.skipif(find_spec("numba") is None, reason="needs numba"),
)


@contextmanager
def loaded() -> Iterator[None]:
    """Load the kernels, which later tests use only if they load them, too (see `conftest.py`)."""
    load_kernels("cpu", print)
    yield
