"""Shorter vectors, similarities and scores from the vectors of texts, in float32.

The names of the outputs of `LLM.embed` are vLLM's (outputs.py).

Knows nothing of requests, files or devices. Guarantees: a result depends only on its own vectors.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...modelzoo.pooling_config import Pooling
from ..errors import RowError, invalid_request

SMALLEST_LENGTH = np.float32(1e-12)


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


def shortened(vectors: np.ndarray, dimensions: int | None, *, normalises: bool) -> np.ndarray:
    """The first features of each vector, again of length 1 if the vectors were normalised.

    Args:
      vectors: The float32 vectors, one a row.
      dimensions: The number of features to keep; None for all.
      normalises: Whether the model normalises its vectors.

    Raises:
      RowError: The vectors have fewer features.
    """
    if dimensions is None or dimensions == vectors.shape[1]:
        return vectors
    if (error := too_many_dimensions(dimensions, vectors.shape[1])) is not None:
        raise error
    kept = vectors[:, :dimensions]
    return kept / _lengths(kept) if normalises else kept


def too_many_dimensions(dimensions: int | None, size: int) -> RowError | None:
    """The error of a number of features above the size of a vector; None for other numbers."""
    if dimensions is None or dimensions <= size:
        return None
    return invalid_request(
        "dimensions", f"expected at most {size}, the features of a vector, got {dimensions}."
    )


def cosines(vectors: np.ndarray, num_first: int) -> np.ndarray:
    """The cosines of the first vectors with the others; one first vector is paired with all."""
    firsts, others = vectors[:num_first], vectors[num_first:]
    products = (firsts / _lengths(firsts) * (others / _lengths(others))).sum(axis=1)
    # rounding may make the cosine of two equal vectors larger than 1
    return products.clip(-1, 1)


def probabilities(outputs: np.ndarray, pooling: Pooling, *, use_activation: bool) -> np.ndarray:
    """The scores of the classes of each text, from the outputs of a classifier."""
    if not use_activation or pooling.scores == "none":
        return outputs
    if pooling.scores == "sigmoid":
        # far below 0, the exponential is infinite and the score 0
        with np.errstate(over="ignore"):
            return 1 / (1 + np.exp(-outputs))
    weights = np.exp(outputs - outputs.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def as_numbers(vector: np.ndarray) -> list[Any]:
    """The float32 numbers as floats with the fewest digits that are read as the same float32."""
    return [float(text) for text in vector.astype(str)]


def _lengths(vectors: np.ndarray) -> np.ndarray:
    lengths = np.sqrt((vectors * vectors).sum(axis=1, keepdims=True))
    return np.maximum(lengths, SMALLEST_LENGTH)
