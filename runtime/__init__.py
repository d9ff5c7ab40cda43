"""The host side: text, files, queues, the engine, the command line. The only package with I/O.

All names are imported on first use, so that commands start fast, and without jax if they need no
device.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comparison.compare import ComparedModel, compare
    from .llm import LLM
    from .request import CompletionOutput, RequestOutput, SampleRule, SamplingParams
    from .structured.params import AllowedTokens, StructuredOutputsParams

__all__ = [
    "LLM",
    "AllowedTokens",
    "ComparedModel",
    "CompletionOutput",
    "RequestOutput",
    "SampleRule",
    "SamplingParams",
    "StructuredOutputsParams",
    "compare",
]
_MODULES = {
    ".comparison.compare": ("ComparedModel", "compare"),
    ".llm": ("LLM",),
    ".request": ("CompletionOutput", "RequestOutput", "SampleRule", "SamplingParams"),
    ".structured.params": ("AllowedTokens", "StructuredOutputsParams"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module, __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
