"""Protocol between the benchmark and an engine: a job file in, a result file out.

Each engine runs in its own process, and may have its own environment, so this file needs only the
standard library: `python ENGINE.py JOB.json RESULT.json`.
"""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """A job: generate exactly `max_tokens[i]` greedy ids for prompt i, and ignore end tokens."""

    model: str
    prompts: list[list[int]]
    max_tokens: list[int]
    num_threads: int
    options: dict = field(default_factory=dict)

    @property
    def common_max_tokens(self) -> int:
        """The number of ids of every row, for engines whose rows begin and end together."""
        (number,) = set(self.max_tokens)
        return number


def write_job(path: Path, job: Job) -> None:
    path.write_text(json.dumps(asdict(job)), encoding="utf-8")


def read_job() -> Job:
    """Return the job named on the command line."""
    return Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))


def finish(
    token_ids: list[list[int]],
    *,
    load_seconds: float,
    warm_up_seconds: float,
    generation_seconds: float,
    versions: dict[str, str],
    cached_tokens: int = 0,
) -> None:
    """Check that every prompt got its tokens, and write the result.

    Args:
        token_ids: The generated ids of every prompt.
        load_seconds: Seconds until the model was loaded.
        warm_up_seconds: Seconds of calls before the generation.
        generation_seconds: Seconds of the generation.
        versions: Versions of the engine's packages.
        cached_tokens: Prompt tokens that were not computed because a cache had them.
    """
    lengths, expected = [len(ids) for ids in token_ids], read_job().max_tokens
    if lengths != expected:
        sys.exit(
            f"expected {len(expected)} rows of {min(expected)}-{max(expected)} tokens, "
            f"got {len(lengths)} rows of {min(lengths)}-{max(lengths)}."
        )
    result = {
        "load_seconds": round(load_seconds, 3),
        "warm_up_seconds": round(warm_up_seconds, 3),
        "generation_seconds": round(generation_seconds, 3),
        "output_tokens": sum(len(ids) for ids in token_ids),
        "cached_tokens": cached_tokens,
        "versions": versions,
        "token_ids": token_ids,
    }
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
