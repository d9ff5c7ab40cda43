"""Fixtures for tests of bundles: a tiny model that was really compiled, and its target."""

import pytest
from tiny import TWO_LAYERS, TinyModel

from noria.compile.targets import Target, find_target


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel(TWO_LAYERS)


@pytest.fixture(scope="module")
def target() -> Target:
    return find_target("cpu")
