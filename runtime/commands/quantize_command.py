"""`noria quantize`: write a model with weights in int8, float8 or int4.

The result is a model directory in the format compressed-tensors, which transformers reads too.
Weights are rounded layer by layer, so a model need not fit into memory. Guarantees: only a new or
empty folder outside the model's directory is written to; it becomes a model only when it is
complete; a model that changes while it is read is an error. After an error, nothing is left in the
folder.
"""

import argparse
import resource
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..console import GIGABYTE, note, tell
from ..errors import ConfigError
from ..files.file_checks import check_new_folder
from .shared_options import (
    add_model,
    add_quiet,
    add_stored_dtype,
    read_numbers,
    stored_dtype,
)

if TYPE_CHECKING:
    from ...modelzoo.weights.weight_formats import WeightFormat


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add_model(parser)
    add(
        "--numbers",
        required=True,
        metavar="FORMAT",
        help="format of weights: int8, float8 or int4; int8 and int4 optionally with the number of "
        "input features that share a scale, as in int4:64",
    )
    add(
        "--method",
        choices=("nearest", "clip", "gptq"),
        default="nearest",
        help="rounding of weights: nearest; clip, with scales of least squared error; gptq, by "
        "calibration rows (default: %(default)s)",
    )
    add(
        "--rotate",
        action="store_true",
        help="first rotate the residual stream and the values, for runs with activations in int8",
    )
    add(
        "--smooth",
        action="store_true",
        help="first scale the input features of matrix products, by calibration rows, for runs "
        "with activations in int8",
    )
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="batch file with rows for --method gptq and --smooth",
    )
    add("--rows", type=int, metavar="N", help="use only the first N calibration rows")
    add("-o", "--output", type=Path, required=True, help="new folder for the model")
    add_stored_dtype(parser, "scales and of weights in float")
    add_quiet(parser)


def run(options: argparse.Namespace) -> int:
    """Quantise the model, and print its size, the time and the peak memory."""
    from ..checkpoint import open_model
    from ..checkpoint.model_files import ModelStamp
    from ..devices import backends
    from ..quantisation.quantise import QuantiseOptions, quantise
    from ..rows.job_text import read_row_ids

    say = partial(note, is_quiet=options.quiet)
    started = time.monotonic()
    weight_format = _weight_format(options.numbers)
    if options.rows is not None and options.rows < 1:
        raise ConfigError(f"--rows: expected at least 1, got {options.rows}.")
    if options.rows is not None and options.calibration is None:
        raise ConfigError("--rows: expected only together with --calibration FILE. Add it.")
    with open_model(options.model) as files:
        stamp = ModelStamp(files)
        check_new_folder(options.output, files.path)
        backends.prepare_jax("cpu")
        files.unread.report(partial(tell, sys.stderr), is_strict=options.strict_config)
        files.check_generates()
        rows = []
        if options.calibration is not None:
            rows = read_row_ids(options.calibration, files)[: options.rows]
        how = QuantiseOptions(
            weight_format,
            options.method,
            options.rotate,
            options.smooth,
            stored_dtype(files, options.dtype, rounds_codes=True),
        )
        num_bytes = quantise(files, options.output, how, rows, stamp=stamp, say=say)
    # kilobytes on Linux
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tell(
        sys.stdout,
        f"{options.output}: {weight_format} by {options.method}, {num_bytes / GIGABYTE:.2f} GB, in "
        f"{time.monotonic() - started:.0f} s with at most {peak / GIGABYTE:.2f} GB of memory",
    )
    return 0


def _weight_format(text: str) -> "WeightFormat":
    """The format of all weights."""
    from ...compile.plan import Numbers

    table = read_numbers(text)
    if other := sorted(table.keys() - {"weights", "group"}):
        raise ConfigError(f"--numbers {text}: expected weights and group alone, got {other}.")
    weight_format = Numbers("float32", **table).weight_rules.default
    if weight_format is None:
        raise ConfigError(f"--numbers {text}: expected a format of codes, such as int8 or int4:64.")
    return weight_format
