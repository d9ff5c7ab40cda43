"""The two kinds of rows: those for tokens or their scores, and those for vectors of texts.

A model may answer one kind only, and a plan has the graphs of one kind. Does not know about files
or devices. Guarantees: a row that its model cannot answer is refused by name; it is not a reason
to refuse the other rows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..embedding.vectors import too_many_dimensions
from ..errors import JobError, RowError, invalid_request
from .lines import BatchRow
from .pooled_body import PooledRequest
from .scan import RowRequirements

if TYPE_CHECKING:
    from ...compile.plan import Plan
    from ...modelzoo.config import DecoderConfig


def refusal(row: BatchRow, config: "DecoderConfig", adapters: Sequence[str]) -> RowError | None:
    """The error of a row of a kind that a model cannot answer; None if the model can.

    Args:
        row: The row.
        config: The model's configuration.
        adapters: The names of adapters that rows of the job may use.
    """
    if row.pooled is None and (reason := config.lacks_generation) is not None:
        asked = "/v1/classify" if config.pooling.labels else "/v1/embeddings"
        asked += " or /v1/score" * (len(config.pooling.labels) == 1)
        problem = (
            f"expected a row for vectors of texts, as the model generates no tokens ({reason}), "
            f"got one for tokens or their scores. Ask for {asked}."
        )
    elif row.pooled is not None and adapters:
        problem = (
            f"expected a row for tokens, as the job has adapters ({', '.join(adapters)}), got one "
            f"for vectors, scores or classes. Merge an adapter into the weights: --merge-adapter."
        )
    elif row.pooled is not None:
        return _pooled_refusal(row.pooled, config)
    else:
        return None
    return invalid_request("url", f"{problem}")


def _pooled_refusal(request: PooledRequest, config: "DecoderConfig") -> RowError | None:
    """The error of a request for vectors, scores or classes that the model cannot answer."""
    labels = config.pooling.labels
    problem = None
    match request.task:
        case "embed" if labels:
            problem = (
                "expected a model of embeddings, got a classifier. Ask for /v1/classify, "
                "/v1/score or /v1/rerank."
            )
        case "embed":
            return too_many_dimensions(request.dimensions, config.pooling.size(config.embed))
        case "classify" if not labels:
            problem = (
                "expected a classifier for /v1/classify, got a model without classes. Ask for "
                "/v1/embeddings."
            )
        case "score" | "rerank" if len(labels) > 1:
            problem = (
                f"expected a model with one class for scores, got {len(labels)}. Ask for "
                f"/v1/classify."
            )
    return None if problem is None else invalid_request("url", f"{problem}")


def text_lengths(rows: Sequence[RowRequirements]) -> list[int]:
    """The lengths of all texts to embed; empty for a job that generates or scores tokens.

    Raises:
        JobError: The model answers both kinds of rows, and the job has both.
    """
    num_pooled = sum(bool(row.text_lengths) for row in rows)
    if num_pooled not in (0, len(rows)):
        raise JobError(
            f"the rows of a job: expected all to ask for vectors of texts (/v1/embeddings, "
            f"/v1/score, /v1/rerank, /v1/classify) or none, got {num_pooled} of {len(rows)} rows "
            f"that do. Their graphs differ: run them as two jobs.",
        )
    return [length for row in rows for length in row.text_lengths]


def check_kind(plan: "Plan", lengths: Sequence[int]) -> None:
    """Refuse a plan for another kind of rows.

    Raises:
        JobError: The plan embeds texts although `lengths` is empty, or does not although it is not.
    """
    if plan.buckets.embed != bool(lengths):
        asked = "vectors of texts" if lengths else "tokens or their scores"
        raise JobError(
            f"plan buckets.embed: expected {str(bool(lengths)).lower()}, as the rows ask for "
            f"{asked}, got {str(plan.buckets.embed).lower()}. Run without --plan, or plan again.",
        )
