"""One small model on disk, and the command in processes of its own."""

import os

import pytest
from command import Noria
from model_on_disk import write_model


@pytest.fixture(scope="session")
def noria(tmp_path_factory) -> Noria:
    root = tmp_path_factory.mktemp("noria")
    write_model(root / "model")
    # one device, as for a user; a compile for eight takes longer
    hidden = ("XLA_FLAGS", "JAX_PLATFORMS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"XDG_CACHE_HOME": str(root / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    return Noria(environment, root / "model")
