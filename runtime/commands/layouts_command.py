"""`noria layouts`: compare layouts of one model on one target, present or absent.

Each layout is checked. If it is legal, its longest prefill graph and its decode graph are compiled
and their programs are read. With `--workload`, the layouts are also ranked by the predicted seconds
of the best plan for these rows under each of them. Writes `layouts.json` and `layouts.png` into the
output folder, and prints a table. Weights are read only with `--verify`, before anything is
compiled.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import note, plural, tell
from ..devices.compiler_messages import without_alarms
from ..errors import EXIT_OK, EXIT_ROWS_FAILED, ConfigError
from ..files.file_checks import check_files, check_fillable
from ..files.layout_files import (
    layout_file,
    named_layout_tables,
    read_layout,
    split_spellings,
)
from .shared_options import add_dtype, add_model, add_quiet

if TYPE_CHECKING:
    from ...compile.grids.bucket_grid import BucketGrid
    from ...compile.hardware.hardware import Hardware
    from ...compile.layout_measure import LayoutResult
    from ...compile.targets import Target
    from ...modelzoo.config import DecoderConfig
    from ...sharding.layout import Layout
    from ..checkpoint import ModelFiles
    from ..layouts.verification import Verification

NOT_FINITE = "not finite"
"""The verdict on a layout with a logit that is not finite."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add_model(parser, reads_weights=False)
    add(
        "--target",
        required=True,
        help="hardware to compile for: cpu:8 (simulated devices), tpu:v5e:2x4, gpu:h100:8, ...",
    )
    add("-o", "--output", type=Path, required=True, help="folder for layouts.json and layouts.png")
    add(
        "--layouts",
        default="all",
        help="layouts to compare, separated by spaces: NAME, NAME@data=2,tensor=4 or FILE "
        "(default: all named layouts)",
    )
    add(
        "--workload",
        type=Path,
        help="batch file, or CSV file with token counts, to predict the seconds of the best plan "
        "under each layout",
    )
    add_dtype(parser)
    _add_graphs(parser)
    add(
        "--verify",
        action="store_true",
        help="run each layout, and compare its logits with those of one device, in float32 unless "
        "--dtype says otherwise",
    )
    add_quiet(parser)


def _add_graphs(parser: argparse.ArgumentParser) -> None:
    """Add the options of the graphs that are compiled."""
    add = parser.add_argument
    add("--slots", type=int, default=64, help="number of slots of the decode graph (default: 64)")
    add(
        "--length",
        type=int,
        default=1024,
        help="length of the cache in tokens, for prompt and output together (default: 1024)",
    )
    add(
        "--prompt",
        type=int,
        default=512,
        help="prompt length of the prefill graph in tokens (default: 512)",
    )
    add(
        "--prompts", type=int, default=8, help="number of prompts of the prefill graph (default: 8)"
    )
    add("--page", type=int, help="entries of a page of the cache (default: 64)")
    add(
        "--attention",
        default="auto",
        metavar="KERNEL",
        help="attention kernel of the prefill graph (default: auto)",
    )
    add(
        "--layers",
        type=int,
        help="number of layers to compile and to run, for a quick result (default: all layers)",
    )
    add(
        "--scan-layers",
        action="store_true",
        help="compile the layers as a loop and not unrolled",
    )


def run(options: argparse.Namespace) -> int:
    """Measure the layouts; returns 1 if a layout that the user named failed, or one is wrong."""
    from ..checkpoint import open_model
    from ..checkpoint.random_model import has_no_weights, with_random_weights

    check_fillable(options.output)
    layouts = map(layout_file, split_spellings(options.layouts))
    read = [Path(options.model), *layouts, options.workload]
    check_files({}, [("an input", path) for path in read], _files_in(options.output))
    # weights that a directory does not have are made up for the comparison
    is_random = options.verify and has_no_weights(Path(options.model))
    with open_model(options.model, needs_weights=options.verify and not is_random) as files:
        files.unread.report(partial(tell, sys.stderr), is_strict=options.strict_config)
        files.check_generates()
        files = _first_layers(options, files)
        if is_random:
            tell(sys.stderr, f"{options.model}: has no weights, so --verify takes random ones")
            files = with_random_weights(files)
        return _run(options, files)


@without_alarms()
def _run(options: argparse.Namespace, files: "ModelFiles") -> int:
    from ...compile.targets import find_target, present_target
    from .. import session
    from ..bundles import compilation_cache
    from ..bundles.cpu_kernels import load_kernels
    from ..devices import backends
    from ..layouts.table import format_table
    from ..planning.layout_table import ranked_lines

    compilation_cache.enable(partial(tell, sys.stderr))
    backends.prepare_jax(options.target)
    load_kernels(options.target, partial(tell, sys.stderr))
    target = (present_target if options.verify else find_target)(options.target)
    dtype = session.resolve_dtype(options.dtype, target)
    config, grid = files.spec.config, _grid(options)
    layouts = _layouts(options.layouts, len(target.devices))
    predicted = [] if options.workload is None else _predicted(options, files, layouts, dtype)
    verification = _verification(options, files, target, dtype) if options.verify else None
    results: list[LayoutResult] = []
    try:
        for layout in layouts:
            result = _measure(options, config, layout, target, grid, dtype)
            result.predicted = _figures_of(result, predicted)
            results.append(result)
        if verification is not None:
            _verify(options, verification, layouts, results)
    finally:
        # figures stay, whatever ends the comparison
        if results:
            tell(sys.stdout, format_table(results))
            if predicted:
                tell(sys.stdout, "\n".join(["", *ranked_lines(predicted)]))
            _write(options, files, dtype, config, grid, results)
    is_wrong = any(
        result.agreement == "differs" or result.verdict == NOT_FINITE for result in results
    )
    is_fine = options.layouts == "all" or not any(result.findings for result in results)
    return EXIT_OK if is_fine and not is_wrong else EXIT_ROWS_FAILED


def _predicted(
    options: argparse.Namespace, files: "ModelFiles", layouts: Sequence["Layout"], dtype: str
) -> list[dict[str, Any]]:
    """The figures of the best plan for the workload under each layout, the fastest first."""
    from ..planning.figures import layout_figures
    from ..planning.plan_options import PlanOptions
    from ..planning.prediction import plan_layouts

    plan_options = PlanOptions(
        options.workload,
        options.target,
        dtype=dtype,
        page=options.page,
        scan_layers=options.scan_layers,
        quiet=options.quiet,
    )
    return layout_figures(*plan_layouts(plan_options, files, layouts))


def _figures_of(
    result: "LayoutResult", predicted: Sequence[dict[str, Any]]
) -> dict[str, Any] | None:
    """The figures of a layout's plan; None without a workload."""
    same = (one for one in predicted if (one["name"], one["mesh"]) == (result.name, result.mesh))
    return next(same, None)


def _layouts(names: str, num_devices: int) -> list["Layout"]:
    """The layouts by their spellings; a named layout without a mesh is fitted to the target."""

    is_all = names == "all"
    spellings = list(named_layout_tables()) if is_all else split_spellings(names)
    if not spellings:
        raise ConfigError("--layouts: expected at least one layout, got none.")
    return [read_layout(spelling, num_devices) for spelling in spellings]


def _first_layers(options: argparse.Namespace, files: "ModelFiles") -> "ModelFiles":
    """The model, or only as many of its layers as `--layers` says."""
    if options.layers is None:
        return files
    num_layers = files.spec.config.num_layers
    if not 0 < options.layers <= num_layers:
        raise ConfigError(
            f"--layers: expected 1 to {num_layers}, the number of layers of the model, got "
            f"{options.layers}."
        )
    return files.first_layers(options.layers)


def _grid(options: argparse.Namespace) -> "BucketGrid":
    from ...compile.grids.bucket_grid import BucketGrid
    from ...compile.grids.prefill_bucket import PrefillBucket

    for option in ("slots", "length", "prompt", "prompts"):
        if (given := getattr(options, option)) < 1:
            raise ConfigError(f"--{option}: expected at least 1, got {given}.")
    if options.prompt > options.length:
        raise ConfigError(
            f"--prompt: expected at most {options.length} tokens, the --length of the cache, got "
            f"{options.prompt}. Change one of them."
        )
    prefill = (PrefillBucket(options.prompt, options.prompts),)
    return BucketGrid(options.length, prefill, options.slots, page=options.page)


def _measure(
    options: argparse.Namespace,
    config: "DecoderConfig",
    layout: "Layout",
    target: "Target",
    grid: "BucketGrid",
    dtype: str,
) -> "LayoutResult":
    from ...compile.attention_kernels import AttentionPlan
    from ...compile.grids.grid_defaults import GridDefaults
    from ...compile.layout_measure import MeasuredModel, measure
    from ...compile.target_names import TargetName

    attention = AttentionPlan(prefill=options.attention)
    groups = GridDefaults.for_layout(layout).slot_groups
    if groups > 1 and not grid.decode_slots % groups:
        # a layout that does not divide the slots is refused by its rules
        grid = replace(grid, slot_groups=groups)

    def report(graph: str, seconds: float) -> None:
        note(f"{layout.name}: {graph}  {seconds:.1f} s", is_quiet=options.quiet)

    result = measure(
        MeasuredModel(config, grid, dtype, attention, options.scan_layers),
        layout,
        target,
        on_graph=report,
        hardware=_hardware(target.name),
        torus=TargetName.parse(target.name).torus,
    )
    if result.findings:
        note(f"{layout.name}: {result.verdict}", is_quiet=options.quiet)
    return result


def _hardware(target: str) -> "Hardware | None":
    """The hardware table of a target's devices; None if no table has their kind."""
    from ...compile.hardware.hardware import UnknownHardware, hardware_of
    from ..files.hardware_files import known_hardware

    try:
        return hardware_of(target, known_hardware(None))
    except UnknownHardware:
        return None


def _verification(
    options: argparse.Namespace, files: "ModelFiles", target: "Target", dtype: str
) -> "Verification":
    """The comparison with one device, whose logits are computed first."""
    from ...compile.attention_kernels import AUTO_ATTENTION, AttentionPlan
    from ..layouts.verification import TOLERANCES, Verification

    attention = AttentionPlan(prefill=options.attention)
    # a named kernel may serve no shorter prompts than those of the compiled graph
    named = (
        {} if attention == AUTO_ATTENTION else {"attention": attention, "length": options.prompt}
    )
    named |= {"page": options.page}
    # right layouts differ by much more in bfloat16, which hides wrong ones
    dtype = dtype if options.dtype != "auto" else "float32"
    verification = Verification(files, target, dtype, options.scan_layers, **named)
    verification.read_reference()
    note(
        f"layouts are equal to one device if no logit differs by more than "
        f"{verification.tolerance:.1e} in {dtype}: {TOLERANCES[dtype]:g} of the largest logit",
        is_quiet=options.quiet,
    )
    return verification


def _verify(
    options: argparse.Namespace,
    verification: "Verification",
    layouts: Sequence["Layout"],
    results: Sequence["LayoutResult"],
) -> None:
    from ..checkpoint.random_model import RANDOM
    from ..layouts.verification import NotFinite

    for layout, result in zip(layouts, results, strict=True):
        if result.findings:
            continue
        try:
            result.max_abs_diff = verification.max_abs_diff(layout)
            result.tolerance = verification.tolerance
            is_random = verification.files.kind == RANDOM
            result.weights = "random" if is_random else "checkpoint"
        except NotFinite as error:
            # the figures of the other layouts stay
            result.verdict = NOT_FINITE
            result.findings.append(str(error))
        else:
            note(
                f"{layout.name}: worst logit difference {result.max_abs_diff:.2e}, "
                f"{result.agreement}",
                is_quiet=options.quiet,
            )


def _write(
    options: argparse.Namespace,
    files: "ModelFiles",
    dtype: str,
    config: "DecoderConfig",
    grid: "BucketGrid",
    results: Sequence["LayoutResult"],
) -> None:
    from ..files.disk import Disk, replace_file
    from ..layouts.picture import draw

    options.output.mkdir(parents=True, exist_ok=True)
    path, picture = _files_in(options.output).values()
    content = json.dumps([result.as_json() for result in results], indent=1)
    replace_file(Disk(), path, [f"{content}\n".encode()])
    title = (
        f"{files.name}, {plural(config.num_layers, 'layer')}, {dtype}, on {options.target}: "
        f"prefill of {plural(grid.prefill[-1].batch, 'prompt')} of {grid.prefill[-1].length}, "
        f"decode of {plural(grid.decode_slots, 'slot')} of {grid.max_length}"
    )
    replace_file(Disk(), picture, [draw(results, title)])
    tell(sys.stdout, f"{path} and {picture}")


def _files_in(folder: Path) -> dict[str, Path]:
    return {"the table": folder / "layouts.json", "the picture": folder / "layouts.png"}
