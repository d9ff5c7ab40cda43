"""The two kinds of rows: those for tokens or their scores, and those for vectors of texts.

A model may answer one kind only, and a plan has the graphs of one kind. Does not know about files
or devices. Guarantees: a row that its model cannot answer is refused by name; it is not a reason
to refuse the other rows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import EXIT_USAGE, JobError, RowError
from .lines import BatchRow
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
        asked = "/v1/classify or /v1/score" if config.pooling.labels else "/v1/embeddings"
        problem = (
            f"expected a row for vectors of texts, as the model generates no tokens ({reason}), "
            f"got one for tokens or their scores. Ask for {asked}."
        )
    elif row.pooled is not None and adapters:
        problem = (
            f"expected a row for tokens, as the job has adapters ({', '.join(adapters)}), got one "
            f"for vectors, scores or classes. Merge an adapter into the weights: --merge-adapter."
        )
    else:
        return None
    return RowError("invalid_request", f"url: {problem}", "url")


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
            EXIT_USAGE,
        )
    return [length for row in rows for length in row.text_lengths]


def check_kind(plan: "Plan", lengths: Sequence[int]) -> None:
    """Refuse a plan for another kind of rows.

    Raises:
        JobError: The plan has other graphs than texts of `lengths` need; no lengths mean tokens.
    """
    if plan.buckets.embed != bool(lengths):
        asked = "vectors of texts" if lengths else "tokens or their scores"
        raise JobError(
            f"plan buckets.embed: expected {str(bool(lengths)).lower()}, as the rows ask for "
            f"{asked}, got {str(plan.buckets.embed).lower()}. Run without --plan, or plan again.",
            EXIT_USAGE,
        )
