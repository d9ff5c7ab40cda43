"""Plans by path: a file, or a bundle's folder. Imports no jax, so that a job can look first."""

from pathlib import Path
from typing import Any

from .run_config import ConfigError, read_toml

PLAN = "plan.toml"
"""Of a bundle."""


def read_plan_table(path: Path) -> dict[str, Any]:
    """The table of a plan, which may be a bundle's."""
    if not path.is_dir():
        return read_toml(path)
    # of a pod every process has a folder with the same plan
    for plan in (path / PLAN, *sorted(path.glob(f"process-*/{PLAN}"))):
        if plan.is_file():
            return read_toml(plan)
    raise ConfigError(
        f"{path}: expected a plan, or the folder of a bundle with {PLAN} in it, got a folder "
        f"without one. Make a bundle with noria compile."
    )
