"""The host side: text, files, queues, the engine, the command line. The only package with I/O.

`LLM` is imported on first use, so that commands without a device start without jax.
"""

from typing import TYPE_CHECKING, Any

from .request import CompletionOutput, RequestOutput, SampleRule, SamplingParams
from .structured.params import StructuredOutputsParams

if TYPE_CHECKING:
    from .llm import LLM

__all__ = [
    "LLM",
    "CompletionOutput",
    "RequestOutput",
    "SampleRule",
    "SamplingParams",
    "StructuredOutputsParams",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from .llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
