"""The errors of reading model files. Each names what was expected, what came, and the remedy.

All derive from `CheckpointError`, so that a command can end with one exit code for "the model is at
fault" and a caller can still branch on the kind.
"""

import importlib
from types import ModuleType


class CheckpointError(ValueError):
    """A model on disk that cannot be used as it is."""

    exit_code = 3


class ModelNotFound(CheckpointError):
    """A path or name at which there is no model, or none in a format that is read."""


class InvalidConfig(CheckpointError):
    """A config.json, generation_config.json or noria.json that is malformed or not plausible."""


class InvalidSafetensors(CheckpointError):
    """A safetensors file or index that is malformed, inconsistent, or outside the limits."""


class InvalidQuantisation(CheckpointError):
    """Quantised tensors and scales that do not belong together; lists every one at once."""


class InvalidGGUF(CheckpointError):
    """A GGUF file that is malformed or outside the limits."""


class InvalidOrbax(CheckpointError):
    """An orbax checkpoint that was not finished, or does not hold what its noria.json says."""


class CheckpointMismatch(CheckpointError):
    """Tensors and parameters that do not cover each other; lists every difference at once."""


class CheckpointChanged(CheckpointError):
    """A weight file that was altered while it was being read."""


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package, or say which extra of noria brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CheckpointError(
            f"Expected the package {module.split('.')[0]!r}, got {error}. "
            f"Install it with: pip install 'noria[{extra}]'"
        ) from error
