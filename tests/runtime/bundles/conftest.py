"""Fixtures for tests of bundles: a tiny model that was really compiled, and its target."""

import pytest
from tiny import TinyModel

from noria.compile.targets import Target, find_target


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return TinyModel()


@pytest.fixture(scope="module")
def target() -> Target:
    return find_target("cpu")
