"""Open models on disk, read what they are, and load their parameters onto devices.

    with open_model("smollm2") as model:
        params = load_params(model.spec, model.tensors, abstract, sharding)

`open_model` reads Hugging Face directories (safetensors), GGUF files and noria's own checkpoints,
which `save_orbax` writes. Importing this package, opening and describing a model import no jax.
"""

from .generation_defaults import GenerationDefaults
from .loader import load_params
from .model_files import ModelFiles
from .opening import open_model
from .orbax_store import save_orbax
from .tensor_source import TensorInfo
from .weights_digest import WeightsDigest

__all__ = [
    "GenerationDefaults",
    "ModelFiles",
    "TensorInfo",
    "WeightsDigest",
    "load_params",
    "open_model",
    "save_orbax",
]
