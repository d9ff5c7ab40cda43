"""The outputs of `LLM.embed`; their names are vLLM's (outputs.py).

Does not know about devices or files.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class EmbeddingOutput:
    """The vector of one text."""

    embedding: np.ndarray
    """A float32 array."""

    @property
    def hidden_size(self) -> int:
        """The number of features of the vector."""
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """The result of one text."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True
