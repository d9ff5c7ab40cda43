"""Turns the vectors of a request into the body of its answer, in the forms of OpenAI and vLLM.

Does not know about files, ids or the journal. Guarantees: numbers are written with the fewest
digits that give the same float32.
"""

import base64
from typing import Any

import numpy as np

from ...modelzoo.pooling_config import Pooling
from ..embedding.texts import lengths_of
from ..embedding.vectors import as_numbers, cosines, probabilities, shortened
from ..request import RequestOutput
from .pooled_body import PooledRequest

PREFIXES = {"embed": "embd-", "score": "score-", "rerank": "rerank-", "classify": "classify-"}
"""The beginning of the ids of answers."""


def pooled_body(
    request: PooledRequest,
    output: RequestOutput,
    pooling: Pooling,
    *,
    answer_id: str,
    created: int,
    model: str,
) -> dict[str, Any]:
    """The body of an answer to a request that the model can answer (`row_kinds`)."""
    vectors = output.vectors
    assert vectors is not None
    num_tokens = sum(lengths_of(output.prompt_token_ids))
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    head = {"id": answer_id, "object": "list", "created": created, "model": model}
    match request.task:
        case "embed":
            data = _embeddings(request, vectors, pooling)
            return {"object": "list", "data": data, "model": model, "usage": usage}
        case "classify":
            return {**head, "data": _classes(request, vectors, pooling), "usage": usage}
        case "score":
            scores = enumerate(_scores(request, vectors, pooling))
            data = [{"index": i, "object": "score", "score": score} for i, score in scores]
            return {**head, "data": data, "usage": usage}
        case "rerank":
            results = _ranked(request, _scores(request, vectors, pooling))
            return {"id": answer_id, "model": model, "usage": usage, "results": results}


def _embeddings(
    request: PooledRequest, vectors: np.ndarray, pooling: Pooling
) -> list[dict[str, Any]]:
    vectors = shortened(vectors, request.dimensions, normalises=pooling.normalises)
    shown: list[Any] = list(map(as_numbers, vectors))
    if request.encoding_format == "base64":
        # little-endian on every machine, as readers expect
        shown = [base64.b64encode(vector.astype("<f4").tobytes()).decode() for vector in vectors]
    return [{"object": "embedding", "index": i, "embedding": x} for i, x in enumerate(shown)]


def _classes(request: PooledRequest, vectors: np.ndarray, pooling: Pooling) -> list[dict[str, Any]]:
    found = probabilities(vectors, pooling, use_activation=request.use_activation)
    return [
        {
            "index": i,
            "label": pooling.labels[int(row.argmax())],
            "probs": as_numbers(row),
            "num_classes": len(row),
        }
        for i, row in enumerate(found)
    ]


def _scores(request: PooledRequest, vectors: np.ndarray, pooling: Pooling) -> list[float]:
    """The score of each pair: the output of a classifier with one class, or the cosine."""
    if not pooling.labels:
        return as_numbers(cosines(vectors, len(request.texts)))
    found = probabilities(vectors, pooling, use_activation=request.use_activation)
    return as_numbers(found[:, 0])


def _ranked(request: PooledRequest, scores: list[float]) -> list[dict[str, Any]]:
    """The documents from the best to the worst; equal ones in their order."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    return [
        {"index": i, "document": {"text": request.others[i]}, "relevance_score": scores[i]}
        for i in order[: request.top_n]
    ]
