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
    """A job: generate exactly `max_tokens` greedy ids for each prompt, and ignore end tokens."""

    model: str
    prompts: list[list[int]]
    max_tokens: int
    num_threads: int
    options: dict = field(default_factory=dict)


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
) -> None:
    """Check that every prompt got its tokens, and write the result."""
    job = read_job()
    lengths = sorted({len(ids) for ids in token_ids})
    if len(token_ids) != len(job.prompts) or lengths != [job.max_tokens]:
        sys.exit(
            f"expected {len(job.prompts)} rows of {job.max_tokens} tokens, "
            f"got {len(token_ids)} rows of lengths {lengths}."
        )
    result = {
        "load_seconds": round(load_seconds, 3),
        "warm_up_seconds": round(warm_up_seconds, 3),
        "generation_seconds": round(generation_seconds, 3),
        "output_tokens": sum(len(ids) for ids in token_ids),
        "versions": versions,
        "token_ids": token_ids,
    }
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
