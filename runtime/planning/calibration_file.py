"""Read a calibration, and compare what it was measured for with what it is read for."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...compile.planning.cost import Calibration
from ..errors import ConfigError


def read_calibration(path: Path, expected: Mapping[str, Any]) -> Calibration:
    """Read the calibration that `noria bench` wrote.

    Args:
      path: The file.
      expected: Fields that the calibration must have.

    Raises:
      ConfigError: The file is no calibration, or it was measured for something else.
    """
    with path.open(encoding="utf-8") as file:
        try:
            calibration = Calibration.from_json(json.load(file))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{path}: expected a calibration in JSON, got: {error}. Write one with noria bench "
                f"--calibration."
            ) from None
        except ValueError as error:
            raise ConfigError(f"{path}: {error}") from None
    for name, value in expected.items():
        if (got := getattr(calibration, name)) != value:
            raise ConfigError(
                f"{path} {name}: expected {value}, got {got}. Calibrate again with noria bench "
                f"--calibration, or plan for the calibrated model, dtype and layout, with the same "
                f"tables (--hardware)."
            )
    return calibration
