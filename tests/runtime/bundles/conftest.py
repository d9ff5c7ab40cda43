"""What the tests of bundles share: a tiny model that was really compiled, and its target."""

from collections.abc import Iterator

import pytest
from tiny import TinyModel

from noria.compile.program_cache import anew
from noria.compile.targets import Target, find_target


@pytest.fixture(scope="module")
def model() -> Iterator[TinyModel]:
    # other tests of this process may have compiled the same graphs into the cache
    with anew:
        yield TinyModel()


@pytest.fixture(scope="module")
def target() -> Target:
    return find_target("cpu")
