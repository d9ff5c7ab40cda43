"""`noria plan`: choose buckets, and a layout, for a workload on a target that need not be there.

Reads the lengths of a workload, weighs every layout and grid of the family by their predicted
seconds, and writes the best as a plan that `noria batch --plan` runs; a report beside it says why.
Weights are not read, and nothing is compiled unless that is asked for.
"""

import argparse
import math
import sys
from functools import partial
from pathlib import Path

from ..console import note, tell
from ..devices.default_target import default_target
from ..errors import ConfigError
from ..files.run_config import add_strict_config


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add("--model", required=True, help="directory (config.json will do), .gguf file, or smollm2")
    add("--workload", type=Path, required=True, help="batch file, or CSV of token counts")
    add("-o", "--output", type=Path, required=True, help="the plan, as TOML")
    add(
        "--target",
        default=default_target(),
        help="cpu, tpu:v5e:2x4, gpu:h100:8, ... (default: %(default)s)",
    )
    add("--report", type=Path, metavar="DIR", help="folder for report.json and report.html")
    add(
        "--layout",
        help="how the model lies on several devices: NAME, NAME@data=2,tensor=4 or FILE, or some "
        "of them joined by spaces (default: all, the best of the named ones over all meshes)",
    )
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of weights")
    add("--from-output", type=Path, metavar="OUT", help="output of a finished job of the workload")
    add(
        "--expected-output",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="of max_tokens that rows emit, where nothing else says (default: 1)",
    )
    add(
        "--max-length",
        type=int,
        metavar="N",
        help="longest prompt and output together, for rows without max_tokens (default: their "
        "longest prompt and the expected output)",
    )
    add("--calibration", type=Path, help="made by noria bench --calibration on the target")
    add("--hardware", type=Path, help="TOML tables of devices, beside the published ones")
    _add_search_options(parser)
    add("--quiet", action="store_true", help="no progress on stderr")
    add_strict_config(parser)


def _add_search_options(parser: argparse.ArgumentParser) -> None:
    """Which plans there are to choose from, and how hard they are looked at."""
    add = parser.add_argument
    add("--chunks", choices=("auto", "never", "always"), default="auto", help="of prompts")
    add(
        "--scan-layers",
        action="store_true",
        help="layers in a loop: deep models compile in seconds, and are slower on the CPU",
    )
    add(
        "--max-padding",
        type=float,
        default=math.inf,
        metavar="RATIO",
        help="of computed to real prompt tokens, dummy rows included, such as 1.05 (default: any)",
    )
    add("--max-prefill-graphs", type=int, default=8, help="default: 8")
    add("--max-decode-graphs", type=int, default=4, help="default: 4")
    add("--max-compile-minutes", type=float, default=math.inf, help="for all graphs together")
    add("--seconds-per-graph", type=float, help="of compiling one (default: by phase and layers)")
    add(
        "--compile-layouts",
        type=int,
        default=0,
        metavar="N",
        help="compile the plans of the best N layouts, as far as their costliest graphs, and order "
        "them anew by what the compiler made of them (default: 0)",
    )
    add("--max-memory-gb", type=float, help="on each device (default: 90 %% of what it has)")
    add("--tries", type=int, default=24, help="grids to simulate at most (default: 24)")


def run(options: argparse.Namespace) -> int:
    """Plan, write, and print a summary."""
    from ...compile.targets import find_target
    from .. import session
    from ..checkpoint import open_model
    from ..files.disk import Disk, replace_file
    from ..planning import report
    from ..planning.prediction import predict
    from ..planning.summary import summary

    _check(options)
    _check_files(options)
    if options.compile_layouts:
        session.prepare_jax(options.target)
        find_target(options.target)

    with open_model(options.model, needs_weights=False) as files:
        files.unread.report(partial(note, options), is_strict=options.strict_config)
        prediction = predict(options, files)
        replace_file(Disk(), options.output, [prediction.plan.to_toml().encode()])
    found = report.to_json(prediction)
    if options.report is not None:
        report.write(prediction, found, options.report)
    tell(sys.stdout, summary(found))
    tell(sys.stdout, f"plan: {options.output}")
    return 0


def _check_files(options: argparse.Namespace) -> None:
    """Refuse what cannot be written, before the work that it is for."""
    from ..batch.job_files import check_files, check_fillable
    from ..files.layout_files import split_spellings
    from ..planning import pictures, report

    read = [options.workload, options.from_output, options.calibration, options.hardware]
    read += map(Path, [options.model, *split_spellings(options.layout or "")])
    others = {}
    if options.report is not None:
        check_fillable(options.report)
        pictures.matplotlib()
        others = report.files_in(options.report)
    check_files({"the plan": options.output}, [("an input", path) for path in read], others)


def _check(options: argparse.Namespace) -> None:
    """Refuse numbers that mean nothing."""
    positive = {
        "--max-prefill-graphs": options.max_prefill_graphs,
        "--max-decode-graphs": options.max_decode_graphs,
        "--max-compile-minutes": options.max_compile_minutes,
        "--max-memory-gb": options.max_memory_gb,
        "--tries": options.tries,
        "--max-length": options.max_length,
    }
    for name, number in positive.items():
        if number is not None and not number > 0:
            raise ConfigError(f"{name}: expected a number above 0, got {number}.")
    if (asked := options.seconds_per_graph) is not None and not 0 < asked < math.inf:
        raise ConfigError(f"--seconds-per-graph: expected seconds above 0, got {asked}.")
    if options.compile_layouts < 0:
        raise ConfigError(
            f"--compile-layouts: expected a number of layouts, got {options.compile_layouts}."
        )
    if not options.max_padding >= 1:
        raise ConfigError(f"--max-padding: expected at least 1, got {options.max_padding}.")
    if not 0 < options.expected_output <= 1:
        raise ConfigError(
            f"--expected-output: expected a share above 0 and of at most 1, got "
            f"{options.expected_output}."
        )
