"""Import packages that only some formats of models and rows need."""

import importlib
from types import ModuleType

from ..errors import CheckpointError


def require(module: str, extra: str, error: type[Exception] = CheckpointError) -> ModuleType:
    """Import an optional package; the error names the extra of noria that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise error(
            f"Expected the package {module.split('.')[0]!r}, got {missing}. "
            f"Install it with: pip install 'noria[{extra}]'"
        ) from missing
