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
_ON_FIRST_USE = {
    "LLM": ".llm",
    "AllowedTokens": ".structured.params",
    "ComparedModel": ".comparison.compare",
    "CompletionOutput": ".request",
    "RequestOutput": ".request",
    "SampleRule": ".request",
    "SamplingParams": ".request",
    "StructuredOutputsParams": ".structured.params",
    "compare": ".comparison.compare",
}


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return getattr(import_module(_ON_FIRST_USE[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
