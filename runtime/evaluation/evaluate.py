"""Run tasks of lm-evaluation-harness on a model of noria, and write the results as it does.

Does not know how requests run. Guarantees: results and samples have the files and the form of the
harness's own command.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..files.optional_packages import require


def evaluate(
    model: Mapping[str, Any],
    tasks: Sequence[str],
    *,
    include_path: Path | None = None,
    output: Path | None = None,
    log_samples: bool = False,
    **options: Any,
) -> str:
    """Run tasks.

    Args:
        model: The model as `pretrained`, and keyword arguments of `LLM`.
        tasks: The names of tasks and of groups of tasks.
        include_path: A folder with files of further tasks.
        output: The folder for the results; None to write no files.
        log_samples: Whether to write every sample, too.
        options: Further arguments of the harness's `simple_evaluate`.

    Returns:
        The results as a table.

    Raises:
        ConfigError: The harness is missing, or a task is not known.
    """
    harness = require("lm_eval", "eval", ConfigError)
    require("lm_eval.tasks", "eval", ConfigError)
    loggers, utils = (
        require(f"lm_eval.{name}", "eval", ConfigError) for name in ("loggers", "utils")
    )
    from . import harness_model  # registers the model  # noqa: F401

    folder = None if include_path is None else str(include_path)
    manager = harness.tasks.TaskManager(include_path=folder)
    known = manager.match_tasks(list(tasks))
    if missing := [task for task in tasks if not manager.match_tasks([task])]:
        raise ConfigError(
            f"--tasks: expected tasks that the harness knows, got {', '.join(missing)}. Name the "
            "folder of own tasks with --include-path."
        )
    tracker = loggers.EvaluationTracker(output_path=None if output is None else str(output))
    results = harness.simple_evaluate(
        model="noria",
        model_args=dict(model),
        tasks=known,
        task_manager=manager,
        evaluation_tracker=tracker,
        log_samples=log_samples,
        **options,
    )
    samples = results.pop("samples", {})
    tracker.save_results_aggregated(results=results, samples=samples or None)
    for task, of_task in samples.items():
        tracker.save_results_samples(task_name=task, samples=of_task)
    tables = [utils.make_table(results)]
    if results.get("groups"):
        tables.append(utils.make_table(results, "groups"))
    return "\n".join(tables)
