"""`noria bench`: measure speed over prompt lengths, output lengths and batch sizes.

The cases are those of llama-batched-bench: PP prompt tokens and TG output tokens for each of B
rows. Each case runs on the bucket grid that a batch job with the same rows would derive, and the
table has the share of computed tokens that are padding. For a model with experts, the JSON file
also has the numbers of dropped and padded tokens in each phase. Prompts are random token ids,
sampling is greedy, and end tokens do not end a row. With `--calibration`, graphs of many shapes are
timed instead, for the predictions of `noria plan`.

Does not know about texts or request files. Guarantees: the figures of runs include neither
compiling nor the first run; the times in the table are medians of the repeats.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..console import tell
from ..devices.default_target import default_target
from ..devices.machine import describe_machine
from ..errors import EXIT_BUILD, ConfigError, JobError, UserError
from ..files.disk import Disk, replace_file
from ..files.file_checks import check_files
from ..files.layout_files import layout_file, read_layout
from ..request import Request, SamplingParams
from .shared_options import add_dtype, add_layout, add_model, add_overrides

if TYPE_CHECKING:
    from ...compile.grids.row_shape import RowShape
    from ...compile.hardware.hardware import Hardware
    from ...compile.plan import Plan
    from ...compile.targets import Target
    from ...sharding.layout import Layout
    from ..checkpoint import ModelFiles
    from ..session import LoadedModel, Session

COLUMNS = ("PP", "TG", "B", "N_KV", "T_PP s", "S_PP t/s", "T_TG s", "S_TG t/s", "T s", "S t/s")

CASE_OPTIONS = ("pp", "tg", "batch", "set", "repeats", "json")
"""Options that a calibration refuses."""
CALIBRATION_OPTIONS = ("hardware", "kind", "longest")
"""Options that are refused without --calibration."""


@dataclass(frozen=True)
class Case:
    """A line of the table: B rows with PP prompt tokens and TG output tokens each."""

    prompt_length: int
    output_length: int
    rows: int

    @property
    def shapes(self) -> "list[RowShape]":
        """The shape of each row."""
        from ...compile.grids.row_shape import RowShape

        return [RowShape(self.prompt_length, self.output_length)] * self.rows

    def __str__(self) -> str:
        return f"PP {self.prompt_length}, TG {self.output_length}, B {self.rows}"


@dataclass(frozen=True)
class Timing:
    """The times of one run of a case."""

    prefill_seconds: float
    """Seconds of prefill and fork calls."""
    decode_seconds: float
    wall_seconds: float


@dataclass
class CaseResult:
    """The grid and the measured times of a case."""

    case: Case
    grid: dict[str, Any]
    build_seconds: float
    padding: dict[str, int]
    compiles_during_run: int
    experts: dict[str, Any] | None
    """The use of the experts; None if the model has none."""
    timings: list[Timing] = field(default_factory=list)

    def median(self, name: str) -> float:
        """The median of a field of `Timing` over all runs."""
        return statistics.median(getattr(timing, name) for timing in self.timings)

    @property
    def waste(self) -> float:
        """The share of computed tokens that are neither prompt nor output tokens."""
        return 1 - self.padding["real_tokens"] / self.padding["computed_tokens"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add_model(parser)
    add(
        "--pp",
        type=_sizes,
        default=[128, 256],
        help="numbers of prompt tokens per row (default: 128,256)",
    )
    add("--tg", type=_sizes, default=[32], help="numbers of output tokens per row (default: 32)")
    add("--batch", type=_sizes, default=[1, 8, 32], help="numbers of rows (default: 1,8,32)")
    add_dtype(parser)
    add("--target", default=default_target(), help="hardware to run on (default: %(default)s)")
    add_layout(parser)
    add_overrides(parser)
    add(
        "--repeats",
        type=int,
        default=3,
        help="measured runs of each case; medians are reported (default: 3)",
    )
    add("--json", type=Path, help="JSON file for the raw times, the grids and the machine")
    add(
        "--calibration",
        type=Path,
        metavar="FILE",
        help="time graphs of many shapes instead of cases, and write this calibration file "
        "for noria plan",
    )
    add(
        "--hardware",
        type=Path,
        metavar="FILE",
        help="with --calibration: TOML file with device tables, in addition to the published ones",
    )
    add(
        "--kind",
        default="",
        help="with --calibration: device table that describes the accelerators of --target, such "
        "as h100 (default: that of their name)",
    )
    add(
        "--longest",
        type=int,
        default=1024,
        metavar="TOKENS",
        help="with --calibration: length of the longest timed rows, in tokens (default: 1024)",
    )


def run(options: argparse.Namespace) -> int:
    """Run all cases, print the table as it grows, and write the JSON file at the end.

    With `--calibration`, time graphs and write the calibration instead.
    """
    from .. import session
    from ..checkpoint import open_model
    from ..planning.case_plan import case_plan

    _check_options(options)
    _check_files(options)
    target = _target(options)
    hardware = None if options.calibration is None else _hardware(options, target)
    with open_model(options.model) as files:
        files.unread.report(partial(tell, sys.stderr), is_strict=options.strict_config)
        files.check_generates()
        layout = _layout(options, files, target)
        if hardware is not None:
            model = session.load_model(files, target, session.LoadOptions(options.dtype, layout))
            return _calibrate(model, hardware, options)
        cases = _cases(options, files.spec.config.max_position)
        dtype = session.resolve_dtype(options.dtype, target)
        plans = [case_plan(files, target, dtype, layout, c.shapes, options.set) for c in cases]
        model = session.OpenedModel(files, target, plans[0]).load()
        say = partial(tell, sys.stdout)
        say(_header(model, options))
        results = []
        for case, plan in zip(cases, plans, strict=True):
            try:
                results.append(run_case(model, case, plan, options.repeats))
            except (RuntimeError, MemoryError) as error:
                raise JobError(f"{case}: {error or type(error).__name__}", EXIT_BUILD) from error
            say(_line(results[-1]))
        if options.json:
            _write(options.json, _report(options, files, model.dtype, results))
    return 0


def run_case(model: "LoadedModel", case: Case, plan: "Plan", repeats: int) -> CaseResult:
    """Build the plan of a case, run it once without timing, and `repeats` times with timing."""
    from .. import session

    started = time.perf_counter()
    generator = session.start(model, plan)
    build_seconds = time.perf_counter() - started
    prompts = random_prompts(case, model.definition.config.vocab_size)
    runs = [_run_once(generator.restarted(0), case, prompts) for _ in range(1 + repeats)]
    reports = [report for _, report in runs]
    return CaseResult(
        case,
        plan.buckets.to_table(),
        build_seconds,
        reports[-1]["padding"],
        sum(report["compiles_during_run"] for report in reports),
        reports[-1].get("experts"),
        [timing for timing, _ in runs[1:]],
    )


def random_prompts(case: Case, vocab_size: int) -> list[list[int]]:
    """Random prompts for a case; the same ones for the same case on every machine."""
    import numpy as np

    rng = np.random.default_rng(0)
    return rng.integers(0, vocab_size, (case.rows, case.prompt_length)).tolist()


def _run_once(
    generator: "Session", case: Case, prompts: list[list[int]]
) -> tuple[Timing, dict[str, Any]]:
    """The times of one run, and its counters."""
    params = SamplingParams(temperature=0, max_tokens=case.output_length, ignore_eos=True)
    for row, prompt in enumerate(prompts):
        generator.submit(Request(str(row), prompt, params))
    started = time.perf_counter()
    outputs = generator.run()
    wall_seconds = time.perf_counter() - started
    failed = next((output.error for output in outputs if output.error), None)
    if failed is not None:
        raise failed
    report = generator.statistics()
    phases = report["phases"]
    prefill_seconds = phases["prefill_seconds"] + phases["fork_seconds"]
    return Timing(prefill_seconds, phases["decode_seconds"], wall_seconds), report


def _check_options(options: argparse.Namespace) -> None:
    if options.repeats < 1:
        raise ConfigError(f"--repeats: expected at least 1, got {options.repeats}.")
    refused = CALIBRATION_OPTIONS if options.calibration is None else CASE_OPTIONS
    parser = argparse.ArgumentParser()
    add_options(parser)
    given = [name for name in refused if getattr(options, name) != parser.get_default(name)]
    if given:
        listed = ", ".join(f"--{name}" for name in given)
        raise ConfigError(
            f"{listed}: expected only together with --calibration FILE. Add it, or leave these out."
            if options.calibration is None
            else f"--calibration: expected no options of cases, got {listed}. A calibration "
            f"chooses its own shapes; leave them out."
        )


def _check_files(options: argparse.Namespace) -> None:
    """Refuse output files that cannot be written, before any work is done."""
    named = {"the file of --json": options.json, "the calibration": options.calibration}
    outputs = {name: path for name, path in named.items() if path is not None}
    read = (Path(options.model), layout_file(options.layout or ""), options.hardware)
    check_files(outputs, [("an input", path) for path in read])


def _write(path: Path, content: dict[str, Any]) -> None:
    replace_file(Disk(), path, [f"{json.dumps(content, indent=1)}\n".encode()])


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise argparse.ArgumentTypeError(
            f"expected positive integers separated by commas, such as 128,256; got {text!r}."
        )
    return sizes


def _cases(options: argparse.Namespace, max_position: int) -> list[Case]:
    """All combinations, in the order of llama-batched-bench; ValueError if one is too long."""
    cases = [Case(*sizes) for sizes in product(options.pp, options.tg, options.batch)]
    for case in cases:
        if case.prompt_length + case.output_length > max_position:
            raise UserError(
                f"--pp, --tg: expected at most {max_position} tokens per row (the model's longest "
                f"sequence), got {case}. Choose smaller numbers."
            )
    return cases


def _target(options: argparse.Namespace) -> "Target":
    """Start jax, and find the devices that run the cases."""
    from ...compile.targets import present_target
    from ..bundles import compilation_cache
    from ..bundles.cpu_kernels import load_kernels
    from ..devices import backends

    compilation_cache.enable(partial(tell, sys.stderr))
    backends.prepare_jax(options.target)
    load_kernels(options.target, partial(tell, sys.stderr))
    return present_target(options.target)


def _layout(options: argparse.Namespace, files: "ModelFiles", target: "Target") -> "Layout | None":
    """The layout of all cases, which is legal for the model."""
    from ..plans import plan_checks

    num_devices = len(target.devices)
    layout = None if options.layout is None else read_layout(options.layout, num_devices)
    plan_checks.check_layout(layout, files, target)
    return layout


def _hardware(options: argparse.Namespace, target: "Target") -> "Hardware":
    """The hardware table that the calibration refers to: that of `--kind`, or of the devices."""
    from ...compile.device_kinds import kind_of
    from ...compile.hardware.hardware import hardware_of
    from ...compile.target_names import TargetName
    from ..files.hardware_files import known_hardware

    found = "" if TargetName.parse(target.name).kind else kind_of(target.devices) or ""
    known = known_hardware(options.hardware)
    return hardware_of(target.name, known, options.kind or found)


def _calibrate(model: "LoadedModel", hardware: "Hardware", options: argparse.Namespace) -> int:
    from ..planning.calibration import measure

    longest = min(options.longest, model.definition.config.max_position)
    say = partial(tell, sys.stdout)
    calibration = measure(model, hardware, longest, options.layout or "", say)
    _write(options.calibration, calibration.to_json())
    say(f"{options.calibration}: median error {calibration.median_error:.1%} over the timed calls")
    return 0


def _header(model: "LoadedModel", options: argparse.Namespace) -> str:
    where = ", ".join(filter(None, (options.target, options.layout, *options.set)))
    title = f"{model.files.name}, {model.dtype}, {where}, medians of {options.repeats}"
    columns = (*COLUMNS, "waste")
    return f"{title}\n\n| {' | '.join(columns)} |\n|{'--:|' * len(columns)}"


def _line(result: CaseResult) -> str:
    case = result.case
    prefill, decode = result.median("prefill_seconds"), result.median("decode_seconds")
    wall = result.median("wall_seconds")
    prompt_tokens = case.prompt_length * case.rows
    output_tokens = case.output_length * case.rows
    total = prompt_tokens + output_tokens
    cells = [
        *(str(n) for n in (case.prompt_length, case.output_length, case.rows, total)),
        f"{prefill:.3f}",
        f"{prompt_tokens / prefill:.1f}",
        f"{decode:.3f}",
        f"{output_tokens / decode:.1f}",
        f"{wall:.3f}",
        f"{total / wall:.1f}",
        f"{result.waste:.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def _report(
    options: argparse.Namespace, files, dtype: str, results: list[CaseResult]
) -> dict[str, Any]:
    settings = {key: str(value) for key, value in vars(options).items() if key != "run"}
    return {
        "settings": settings,
        "model": {"name": files.name, "fingerprint": files.fingerprint(), "dtype": dtype},
        "machine": describe_machine(),
        "cases": [asdict(result) | {"waste": result.waste} for result in results],
    }
