"""The command `noria`: its subcommands, their options, and what the exit codes mean.

Every subcommand's work is in a module of its own that is imported when it is called, so that
`noria --help` and the rerun of a finished job load nothing heavy.

Exit codes: 0 all rows fine, 1 some rows failed, 2 usage or configuration, 3 model or checkpoint,
4 compile or memory, 75 stopped and resumable, 130 interrupted.
"""

import argparse
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from . import errors
from .console import printable, tell
from .errors import ConfigError
from .files.run_config import add_strict_config
from .pods import pod_options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; errors of the user become one line on stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(arguments)
    try:
        _refuse_urls(arguments)
        return options.run(options)
    except BaseException as error:
        code = errors.exit_code(error)
        if code is None:
            raise
        if options.debug:
            tell(sys.stderr, traceback.format_exc().rstrip())
        else:
            tell(sys.stderr, f"noria: {errors.message(error)}")
        if errors.is_stop(error):
            errors.leave_at_once(code)
        return code


def _refuse_urls(arguments: Sequence[str]) -> None:
    """Refuse URLs as they were typed, before a path drops one of their two slashes."""
    for argument in arguments:
        found = re.fullmatch(r"(?:-[^=]*=)?([A-Za-z][A-Za-z0-9+.-]*://.*)", argument, re.DOTALL)
        if found is not None:
            raise ConfigError(
                f"{found[1]}: expected a path on this machine, as noria opens no URLs. Copy it "
                "here, or mount it, and give the path."
            )


class _Parser(argparse.ArgumentParser):
    """A parser whose errors show control characters in arguments escaped."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="noria",
        description="Define-then-run LLM batch inference on JAX.",
        epilog=__doc__.partition("\n\n")[2] if __doc__ else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_batch(commands)
    _add_merge(commands)
    _add_modules(commands)
    _add_inspect(commands)
    doctor = commands.add_parser("doctor", help="what this machine offers")
    doctor.set_defaults(run=_run_doctor)
    return parser


def _add_batch(commands: "argparse._SubParsersAction[_Parser]") -> None:
    batch = commands.add_parser(
        "batch",
        help="answer every row of a file",
        description="Answer every row of a JSON Lines file. Stopped at any moment, the same "
        "command goes on where it was.",
        epilog="example: noria batch -i examples/hello.jsonl -o out.jsonl --model smollm2",
    )
    add = batch.add_argument
    add("-i", "--input", type=Path, required=True, help="OpenAI Batch lines, or simple lines")
    add("-o", "--output", type=Path, required=True, help="results, in input order")
    add("--model", required=True, help="directory, .gguf file, or smollm2")
    add("--plan", type=Path, help="plan or bundle; by default derived from the input")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of weights")
    add(
        "--target",
        help="hardware to run on (default: the plan's, or this machine's accelerator, or cpu)",
    )
    add(
        "--layout", help="how the model lies on several devices: a name, name@data=2,tensor=4, FILE"
    )
    add("--seed", type=int, default=0, help="seeds rows that bring no seed of their own")
    add("--set", action="append", default=[], metavar="A.B=V", help="override a key of the plan")
    add(
        "--generation-config",
        choices=("model", "none"),
        default="model",
        help="sampling defaults: those of the model's generation_config.json, or noria's",
    )
    add(
        "--now",
        metavar="TIME",
        help="local time that chat templates see, as 2026-01-31T12:00:00 (default: when the job "
        "starts); give all parts of a job the same time",
    )
    add("--grace-seconds", type=float, default=20.0, help="for rows in flight at a first signal")
    add("--on-error", choices=("row", "raise"), default="row", help="raise: stop at a bad row")
    add("--error-file", type=Path, help="write error rows here instead of into the output")
    add("--rows", default="0/1", metavar="I/N", help="only rows I, I+N, I+2N, ...; see noria merge")
    add(
        "--expect-weights",
        type=_weights_digest,
        metavar="SHA256",
        help="refuse weights with another digest; noria inspect --weights-digest prints it",
    )
    add("--restart", action="store_true", help="discard what an earlier run has finished")
    add("--quiet", action="store_true", help="no progress on stderr")
    add_strict_config(batch)
    several = batch.add_argument_group("several processes over one mesh")
    pod_options.add_options(several)
    several.add_argument(
        "--allow-different-numerics",
        action="store_true",
        help="go on with a job that another set-up of processes began; the manifest says so",
    )
    batch.set_defaults(run=_run_batch)


def _weights_digest(text: str) -> str:
    from .checkpoint.weights_digest import parse_digest

    try:
        return parse_digest(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_modules(commands: "argparse._SubParsersAction[_Parser]") -> None:
    """Subcommands with a module each that has their options, and loads nothing heavy for them."""
    from .commands import bench_command as bench
    from .commands import compile_command, convert_command
    from .commands import layouts_command as layouts_command
    from .commands import plan_command as plan_command

    def add(module: ModuleType, name: str, what: str, description: str, example: str) -> None:
        epilog = f"example: noria {name} --model smollm2 {example}"
        module.add_options(
            commands.add_parser(name, help=what, description=description, epilog=epilog)
        )

    add(
        plan_command, "plan", "choose buckets for a workload",
        "Choose the buckets that serve a workload best on a target, which need not be there, and "
        "predict what they cost. Every second is a prediction.",
        "--workload in.jsonl -o plan.toml",
    )  # fmt: skip
    add(
        compile_command, "compile", "build every executable of a plan, and keep them",
        "Compile a plan into a bundle, which noria batch --plan starts from without compiling. For "
        "an absent target everything is compiled and reported.",
        "--plan plan.toml -o bundle",
    )  # fmt: skip
    add(
        convert_command, "convert", "write a model as a checkpoint of noria's own",
        "Write any model that noria loads as an orbax checkpoint, with its tokenizer and "
        "generation defaults.",
        "-o checkpoint",
    )  # fmt: skip
    add(
        layouts_command, "layouts", "compare layouts: legality, memory, collectives",
        "Check layouts of a model on a target, compile them and read what they cost.",
        "--target cpu:6 -o report --verify",
    )  # fmt: skip
    add(
        bench, "bench", "speed over batch sizes and lengths",
        "Speed over prompt lengths (PP), output lengths (TG) and batch sizes (B).",
        "--pp 128 --tg 32 --batch 1,8",
    )  # fmt: skip


def _add_inspect(commands: "argparse._SubParsersAction[_Parser]") -> None:
    inspect = commands.add_parser("inspect", help="what a checkpoint holds")
    inspect.add_argument("model", help="directory, .gguf file, or smollm2")
    inspect.add_argument(
        "--weights-digest", action="store_true", help="print the digest of all weights"
    )
    add_strict_config(inspect)
    inspect.set_defaults(run=_run_inspect)


def _add_merge(commands: "argparse._SubParsersAction[_Parser]") -> None:
    merge = commands.add_parser(
        "merge",
        help="the parts of a job into one file",
        description="Put the parts of a job, each answered by noria batch --rows I/N, together in "
        "input order. Every part must be finished, with its manifest beside it. Parts keep their "
        "error rows in their places; --error-file takes them out here.",
        epilog="example: noria merge part0.jsonl part1.jsonl -o out.jsonl",
    )
    add = merge.add_argument
    add("parts", nargs="+", type=Path, metavar="PART", help="outputs of all N parts, in any order")
    add("-o", "--output", type=Path, required=True, help="results, in input order")
    add("--error-file", type=Path, help="write error rows here instead of into the output")
    add("--quiet", action="store_true", help="nothing on stderr")
    merge.set_defaults(run=_run_merge)


def _run_batch(options: argparse.Namespace) -> int:
    from .commands.batch_command import run

    return run(options)


def _run_merge(options: argparse.Namespace) -> int:
    from .batch.merge import merge
    from .batch.progress import Progress

    progress = Progress(is_quiet=options.quiet)
    return merge(options.parts, options.output, error_file=options.error_file, progress=progress)


def _run_inspect(options: argparse.Namespace) -> int:
    from .checkpoint import open_model

    with open_model(options.model) as files:
        tell(sys.stdout, files.describe(digest_weights=options.weights_digest))
        if options.strict_config:
            files.unread.report(str, is_strict=True)
    return 0


def _run_doctor(options: argparse.Namespace) -> int:
    from .commands import doctor_command as doctor

    return doctor.main()


if __name__ == "__main__":
    sys.exit(main())
