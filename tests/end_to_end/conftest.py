"""One small model on disk and one compile cache for all tests of the command."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import cycle

import pytest
from command import Noria
from fork_server import fork_server
from model_on_disk import write_model


@pytest.fixture(scope="session")
def noria(tmp_path_factory, optimizes: bool) -> Iterator[Noria]:
    root = tmp_path_factory.mktemp("noria")
    model = root / "model"
    write_model(model)
    environment = {**os.environ, "XDG_CACHE_HOME": str(root / "cache")}
    # one device, as for a user
    del environment["XLA_FLAGS"]
    # the command chooses the platforms
    del environment["JAX_PLATFORMS"]
    # no GPU, as not every machine has one
    environment["CUDA_VISIBLE_DEVICES"] = ""
    # as in this process
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = str(int(not optimizes))
    if sys.platform != "linux":
        yield Noria(environment, model)
        return
    with ExitStack() as servers:
        # two servers, so that commands also differ in the hashes of strings
        both = [servers.enter_context(fork_server(environment)) for _ in range(2)]
        yield Noria(environment, model, cycle(both))
