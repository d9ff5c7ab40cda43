"""Import packages that only some formats of models need."""

import importlib
from types import ModuleType

from ..errors import CheckpointError


def require(module: str, extra: str) -> ModuleType:
    """Import an optional package; CheckpointError names the extra of noria that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise CheckpointError(
            f"Expected the package {module.split('.')[0]!r}, got {error}. "
            f"Install it with: pip install 'noria[{extra}]'"
        ) from error
