"""Reads from the options of `noria plan` the model, its numbers, the hardware and the limits.

Reads tables of hardware and calibrations, and no weights. Knows nothing of workloads and grids.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...compile.hardware.hardware import Hardware, hardware_of
from ...compile.plan import Numbers, PlannedModel
from ...compile.planning.candidates import Budget
from ...compile.planning.compile_time import GraphSeconds
from ...compile.planning.cost import Calibration
from ...compile.target_names import TargetName
from ...modelzoo.config import Arrangement, DecoderConfig
from ...modelzoo.layer_groups import block_layers
from ..checkpoint import ModelFiles
from ..checkpoint.published_numbers import keep_published
from ..devices.graph_memory import MEMORY_SHARE
from ..devices.machine import faster_dtype
from ..errors import CheckpointError, ConfigError
from ..files.hardware_files import known_hardware
from .plan_options import PlanOptions


def planned_model(options: PlanOptions, files: ModelFiles) -> PlannedModel:
    """The model of a plan, as the options describe it."""
    return PlannedModel(files.name, _fingerprint(files), options.scan_layers)


def numbers_of(options: PlanOptions, files: ModelFiles) -> Numbers:
    """The numbers of a plan, as the options and the files of the model describe them."""
    dtype = options.dtype
    if dtype == "auto":
        dtype = faster_dtype(TargetName.parse(options.target).platform)
    formats = {
        name: getattr(options, name) for name in ("weights", "group", "cache", "activations")
    }
    return keep_published(Numbers(dtype, **formats), files)


def calibration_of(options: PlanOptions, files: ModelFiles, numbers: Numbers) -> Calibration | None:
    """The calibration of a model with these numbers; None if the options name none.

    Raises:
      ConfigError: It was measured with other numbers, or cannot be read.
    """
    if options.calibration is None:
        return None
    if numbers != Numbers(numbers.dtype):
        raise ConfigError(
            f"--calibration: expected float weights and a float cache, which calibrations are "
            f"measured with, got {numbers.to_table()}. Plan without it."
        )
    hardware = hardware_of_options(options)
    expected = {
        "model": _fingerprint(files),
        "dtype": numbers.dtype,
        "layout": options.layout or "",
        "hardware": {"name": hardware.name, **hardware.peaks()},
    }
    return _read_calibration(options.calibration, expected)


def _read_calibration(path: Path, expected: Mapping[str, Any]) -> Calibration:
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


def hardware_of_options(options: PlanOptions) -> Hardware:
    """The hardware of the target, also from tables of the user."""
    return hardware_of(options.target, known_hardware(options.hardware))


def budget_of(options: PlanOptions, config: DecoderConfig, hardware: Hardware) -> Budget:
    """The limits on graphs, memory, compile time and padding that the options set.

    Decode graphs take longer to compile under a layout (`GraphSeconds.with_entries`).

    Raises:
      ConfigError: The devices do not have as much memory.
    """
    platform, gigabytes = TargetName.parse(options.target).platform, options.max_memory_gb
    if gigabytes is not None and gigabytes * 1e9 > hardware.memory_bytes:
        raise ConfigError(
            f"--max-memory-gb: expected at most {hardware.memory_bytes / 1e9:g} GB, the memory of "
            f"a device of {options.target}, got {gigabytes:g}. Lower it, or describe devices with "
            f"more memory in a file for --hardware."
        )
    num_defined = len(block_layers(config, Arrangement(scan_layers=options.scan_layers)))
    return Budget(
        prefill_graphs=options.max_prefill_graphs,
        memory_bytes=MEMORY_SHARE * hardware.memory_bytes if gigabytes is None else gigabytes * 1e9,
        compile_seconds=options.max_compile_minutes * 60,
        padding=options.max_padding,
        graph_seconds=GraphSeconds.predicted(platform, num_defined),
    )


def _fingerprint(files: ModelFiles) -> str:
    """The fingerprint of the model; empty without weights, as the plan then fits any such model."""
    try:
        return files.fingerprint()
    except CheckpointError:
        return ""
