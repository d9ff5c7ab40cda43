"""`noria plan`: choose buckets and a layout for a workload on a target, present or absent.

Reads the lengths of a workload, compares layouts and bucket grids by their predicted seconds, and
writes the best ones as a plan for `noria batch --plan`. A report explains the choice. Weights are
not read. Graphs are compiled only with `--compile-layouts`.
"""

import argparse
import math
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..console import note, tell
from ..devices.default_target import default_target
from ..errors import ConfigError
from ..files.remote import path_or_url
from ..files.run_config import read_plan_table
from ..planning.plan_options import PlanOptions
from .shared_options import add_adapters, add_dtype, add_model, add_quiet, open_adapters, typed

if TYPE_CHECKING:
    from ...compile.plan import Plan
    from ..checkpoint import ModelFiles
    from ..planning.prediction import Prediction
    from ..planning.workload import Workload

_OF_PLAN = (
    "output", "layout", "dtype", "weights", "group", "cache", "activations", "page",
    "scan_layers", "compile_layouts", "adapters",
)  # fmt: skip
"""The options that a checked plan takes the place of."""
_OF_DECODE = (
    "report", "from_output", "expected_output", "max_length", "calibration", "hardware", "chunks",
    "max_padding", "max_prefill_graphs", "max_compile_minutes",
    "compile_layouts", "max_memory_gb", "tries", "cache", "page",
)  # fmt: skip
"""The options of the search and of the cache, which a plan for vectors of texts does not have."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add_model(parser, reads_weights=False)
    add(
        "--workload",
        type=path_or_url,
        required=True,
        help="batch file, or CSV file with token counts, to plan for; or its URL",
    )
    add("-o", "--output", type=Path, help="file for the plan, in TOML")
    add(
        "--check",
        type=Path,
        metavar="PLAN",
        help="price this plan for the workload, beside the planner's own, and write no plan",
    )
    add(
        "--target",
        default=default_target(),
        help="hardware to plan for: cpu, tpu:v5e:2x4, gpu:h100:8, ... (default: %(default)s)",
    )
    add("--report", type=Path, metavar="DIR", help="folder for report.json and report.html")
    add(
        "--layout",
        help="layouts of the model on several devices to choose from, separated by spaces: NAME, "
        "NAME@data=2,tensor=4 or FILE (default: all named layouts over all meshes)",
    )
    add_adapters(parser)
    add_dtype(parser)
    _add_numbers(parser)
    _add_lengths(parser)
    add(
        "--calibration",
        type=Path,
        help="calibration file that noria bench --calibration wrote on the target",
    )
    add(
        "--hardware",
        type=Path,
        help="TOML file with device tables, in addition to the published ones",
    )
    _add_search_options(parser)
    add_quiet(parser)


def _add_numbers(parser: argparse.ArgumentParser) -> None:
    """Add the options of the formats of weights, keys and values, and activations."""
    add = parser.add_argument
    add(
        "--weights",
        choices=("float", "int8", "float8", "int4", "as_published"),
        default="float",
        help="format of weights, numbers.weights of the plan (default: %(default)s)",
    )
    add(
        "--group",
        type=int,
        default=0,
        metavar="N",
        help="number of input features that share a scale (default: one scale for each output "
        "feature)",
    )
    add(
        "--cache",
        choices=("float", "int8", "float8", "int4"),
        default="float",
        help="format of keys and values, numbers.cache of the plan (default: %(default)s)",
    )
    add(
        "--activations",
        choices=("float", "int8"),
        default="float",
        help="format of activations, numbers.activations of the plan; int8 needs int8 weights "
        "(default: %(default)s)",
    )


def _add_lengths(parser: argparse.ArgumentParser) -> None:
    """Add the options of the expected output lengths."""
    add = parser.add_argument
    add(
        "--from-output",
        type=path_or_url,
        metavar="OUT",
        help="output of a finished job, or its URL, for the output lengths: those of its rows if "
        "the job had this workload, else learned by endpoint and prompt length",
    )
    add(
        "--expected-output",
        type=float,
        default=1.0,
        metavar="SHARE",
        help="expected output as a share of max_tokens, if neither a table nor --from-output has "
        "the lengths (default: 1)",
    )
    add(
        "--max-length",
        type=int,
        metavar="N",
        help="largest number of tokens of prompt and output together, for rows without max_tokens "
        "(default: the longest of their prompts plus the expected output)",
    )


def _add_search_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that limit the search."""
    add = parser.add_argument
    add(
        "--chunks",
        choices=("auto", "never", "always"),
        default="auto",
        help="use chunked prefill: auto, never, always (default: auto)",
    )
    add(
        "--page",
        type=int,
        metavar="N",
        help="entries of a page of the cache, a power of two (default: 64)",
    )
    add(
        "--scan-layers",
        action="store_true",
        help="compile the layers as a loop: faster to compile, and slower to run on the CPU",
    )
    _add_limits(parser)
    add(
        "--compile-layouts",
        type=int,
        default=0,
        metavar="N",
        help="compile the costliest graphs of the best N layouts, and choose the layout by the "
        "compiled graphs (default: 0)",
    )
    add(
        "--max-memory-gb",
        type=float,
        metavar="GB",
        help="memory for weights and cache on each device, in GB (default: 90 %% of the device)",
    )
    add(
        "--tries",
        type=int,
        default=24,
        metavar="N",
        help="largest number of grids to simulate for each layout (default: 24)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Add the options that limit padding, graphs, and the time to compile them."""
    add = parser.add_argument
    add(
        "--max-padding",
        type=float,
        default=math.inf,
        metavar="RATIO",
        help="largest ratio of computed to real prompt tokens, dummy rows included, such as 1.05 "
        "(default: no limit)",
    )
    add(
        "--max-prefill-graphs",
        type=int,
        default=8,
        metavar="N",
        help="largest number of prefill graphs (default: 8)",
    )
    add(
        "--max-compile-minutes",
        type=float,
        default=math.inf,
        metavar="MINUTES",
        help="largest predicted time to compile all graphs, in minutes (default: no limit)",
    )


def run(options: argparse.Namespace) -> int:
    """Make the plan, write the plan and its report, and print a summary."""
    from ..batch.remote_files import files_copied

    _check(options)
    with ExitStack() as copies:
        for name, has_manifest in (("workload", False), ("from_output", True)):
            if (place := getattr(options, name)) is not None:
                copy = copies.enter_context(files_copied([place], with_manifests=has_manifest))
                setattr(options, name, copy[0])
        return _plan(options)


def _plan(options: argparse.Namespace) -> int:
    """Make the plan from files of this machine."""
    from ...compile.targets import find_target
    from ..bundles.cpu_kernels import load_kernels
    from ..checkpoint import open_model
    from ..devices import backends
    from ..files.disk import Disk, replace_file
    from ..planning import report
    from ..planning.prediction import predict, workload_of
    from ..planning.summary import summary

    given = None
    if options.check is not None:
        from ...compile.plan import Plan

        given = Plan.from_table(read_plan_table(options.check))
        options.target = given.target
    _check_files(options)
    if options.compile_layouts:
        backends.prepare_jax(options.target)
        find_target(options.target)
    load_kernels(options.target, partial(note, is_quiet=options.quiet))

    # the shapes of adapters are compared with those of the weights
    with open_model(options.model, needs_weights=bool(options.adapters)) as files:
        files.unread.report(partial(tell, sys.stderr), is_strict=options.strict_config)
        adapters, models = open_adapters(options.adapters, options.model, files)
        typed_options = typed(PlanOptions, options)
        if given is not None:
            prediction = _checked(typed_options, files, given)
        else:
            workload = workload_of(typed_options, files, models)
            if workload.text_lengths:
                return _plan_texts(options, files, workload)
            files.check_generates()
            room = None if adapters is None else adapters.grid()
            prediction = predict(typed_options, files, workload, room)
            replace_file(Disk(), options.output, [prediction.plan.to_toml().encode()])
    content = report.to_json(prediction)
    if options.report is not None:
        report.write(prediction, content, options.report)
    tell(sys.stdout, summary(content))
    tell(sys.stdout, f"plan: {options.check or options.output}")
    return 0


def _checked(options: PlanOptions, files: "ModelFiles", plan: "Plan") -> "Prediction":
    """The seconds of a given plan, which must be one of the model."""
    from ..planning.prediction import check_plan
    from ..plans import plan_checks

    plan_checks.check_model(plan, files)
    if plan.buckets.embed:
        raise ConfigError(
            "--check: expected a plan that generates or scores, got one for vectors of texts, "
            "whose seconds are not predicted."
        )
    return check_plan(options, files, plan)


def _plan_texts(options: argparse.Namespace, files: "ModelFiles", workload: "Workload") -> int:
    """Make the plan of a workload that asks for vectors of texts."""
    from ..files.disk import Disk, replace_file
    from ..planning.embedding_plan import plan_texts, text_summary

    _refuse(options, _OF_DECODE, "for vectors of texts, whose plan has no search and no cache")
    plan = plan_texts(typed(PlanOptions, options), files, workload)
    replace_file(Disk(), options.output, [plan.to_toml().encode()])
    tell(sys.stdout, text_summary(plan, files, workload))
    tell(sys.stdout, f"plan: {options.output}")
    return 0


def _refuse(options: argparse.Namespace, names: Iterable[str], where: str) -> None:
    """Refuse options that have no effect somewhere, and that are not at their defaults."""
    parser = argparse.ArgumentParser()
    add_options(parser)
    for name in names:
        if (value := getattr(options, name)) != parser.get_default(name):
            raise ConfigError(
                f"--{name.replace('_', '-')}: expected none {where}, got {value}. Leave it out."
            )


def _check_files(options: argparse.Namespace) -> None:
    """Refuse output files that cannot be written, before any work is done."""
    from ..files import png_figure
    from ..files.file_checks import check_files, check_fillable
    from ..files.layout_files import split_spellings
    from ..planning import report

    read = [options.workload, options.from_output, options.calibration, options.hardware]
    read += map(Path, [options.model, *split_spellings(options.layout or "")])
    read += (Path(adapter.partition("=")[2]) for adapter in options.adapters)
    report_files = {}
    if options.report is not None:
        check_fillable(options.report)
        png_figure.matplotlib()
        report_files = report.files_in(options.report)
    read.append(options.check)
    written = {} if options.output is None else {"the plan": options.output}
    check_files(written, [("an input", path) for path in read], report_files)


def _check(options: argparse.Namespace) -> None:
    """Refuse numbers outside of their ranges, and options that exclude each other."""
    if options.check is not None:
        _refuse(options, _OF_PLAN, "beside --check, whose plan has its own")
    elif options.output is None:
        raise ConfigError(
            "-o: expected a file for the plan, or a plan to price with --check, got neither."
        )
    positive = {
        "--max-prefill-graphs": options.max_prefill_graphs,
        "--max-compile-minutes": options.max_compile_minutes,
        "--max-memory-gb": options.max_memory_gb,
        "--tries": options.tries,
        "--max-length": options.max_length,
    }
    for name, number in positive.items():
        if number is not None and not number > 0:
            raise ConfigError(f"{name}: expected a number above 0, got {number}.")
    if (page := options.page) is not None and (page < 1 or page & (page - 1)):
        raise ConfigError(f"--page: expected a power of two, got {page}. Take 64, or another.")
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
