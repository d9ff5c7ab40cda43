"""The command line of `noria`: its subcommands, their options and help.

Every subcommand has a module in this folder with `add_options` and `run`. These modules import
nothing heavy before `run`, so that `noria --help` and the rerun of a finished job start fast.
"""

import argparse
import itertools
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from types import ModuleType
from typing import NamedTuple, NoReturn

from ..console import printable
from ..errors import ConfigError
from ..files.remote import Url, is_url
from ..process.standard_streams import TimedLines
from . import (
    batch_command,
    bench_command,
    compare_command,
    compile_command,
    convert_command,
    doctor_command,
    eval_command,
    inspect_command,
    layouts_command,
    merge_command,
    plan_command,
    quantize_command,
)


def run_command(arguments: Sequence[str]) -> int:
    """Parse the options of a subcommand, run it, and return its exit code."""
    options = command_parser().parse_args(arguments)
    if getattr(options, "log_times", False):
        sys.stderr = TimedLines(sys.stderr)
    _refuse_urls(arguments, options)
    return options.run(options)


def _refuse_urls(arguments: Sequence[str], options: argparse.Namespace) -> None:
    """Refuse URLs of options that take paths: as a path, a URL loses one of its two slashes."""
    values = vars(options).values()
    listed = [value for value in values if isinstance(value, list)]
    known = {value.text for value in itertools.chain(values, *listed) if isinstance(value, Url)}
    for argument in arguments:
        # the value of -oURL or --output=URL
        url = re.sub(r"^(?:--[^=]*=|-[A-Za-z](?=[A-Za-z0-9+.-]+://))", "", argument)
        if is_url(url) and url not in known and argument not in known:
            raise ConfigError(
                f"{url}: expected a path on this machine, as this option opens no URLs. Copy the "
                "file here, or mount it, and give the path."
            )


class _Command(NamedTuple):
    """A subcommand: its module, and the texts of its help."""

    module: ModuleType
    help: str
    description: str
    example: str


_COMMANDS = {
    "batch": _Command(
        batch_command,
        "answer every row of a file",
        "Answer every row of a file. If the job is stopped at any moment, the same command resumes "
        "it.",
        "noria batch -i examples/hello.jsonl -o out.jsonl --model smollm2",
    ),
    "merge": _Command(
        merge_command,
        "merge the parts of a job into one file",
        "Merge the parts of a job, each answered by noria batch --rows I/N, in input order. Every "
        "part must be finished and have its manifest beside it. Error rows stay in their places; "
        "--error-file writes them to a separate file.",
        "noria merge part0.jsonl part1.jsonl -o out.jsonl",
    ),
    "plan": _Command(
        plan_command,
        "choose buckets and a layout for a workload",
        "Choose the best buckets and layout for a workload on a target, which may be absent. All "
        "times are predictions.",
        "noria plan --model smollm2 --workload in.jsonl -o plan.toml",
    ),
    "compile": _Command(
        compile_command,
        "compile every graph of a plan into a bundle",
        "Compile a plan into a bundle. noria batch --plan starts from a bundle without compiling. "
        "The target may be absent; then the bundle has the memory and compile time of each graph.",
        "noria compile --model smollm2 --plan plan.toml -o bundle",
    ),
    "convert": _Command(
        convert_command,
        "convert a model into noria's own checkpoint format",
        "Write any model that noria loads as an orbax checkpoint, with its tokenizer and "
        "generation defaults.",
        "noria convert --model smollm2 -o checkpoint",
    ),
    "quantize": _Command(
        quantize_command,
        "write a model with weights in int8, float8 or int4",
        "Round the weights of a model to int8, float8 or int4, layer by layer, and write a model "
        "directory in the format compressed-tensors.",
        "noria quantize --model smollm2 --numbers int8 -o smollm2-int8",
    ),
    "compare": _Command(
        compare_command,
        "compare the predictions of models or number formats",
        "Compare the next-token distributions of models, or of one model in several number "
        "formats, over the same tokens: divergence, equal choices and perplexity.",
        "noria compare --model smollm2 --numbers float --numbers int8 -i examples/hello.jsonl "
        "-o report",
    ),
    "eval": _Command(
        eval_command,
        "run tasks of lm-evaluation-harness on a model",
        "Run tasks of lm-evaluation-harness on a model, and write results as the harness does. All "
        "requests of a kind run in one batch.",
        "noria eval --model smollm2 --tasks lambada_openai -o results",
    ),
    "layouts": _Command(
        layouts_command,
        "compare layouts: legality, memory, collectives",
        "Check layouts of a model on a target, compile them, and report their cost.",
        "noria layouts --model smollm2 --target cpu:6 -o report --verify",
    ),
    "bench": _Command(
        bench_command,
        "measure speed over batch sizes and lengths",
        "Measure speed over prompt lengths (PP), output lengths (TG) and batch sizes (B).",
        "noria bench --model smollm2 --pp 128 --tg 32 --batch 1,8",
    ),
    "inspect": _Command(
        inspect_command,
        "report the contents of a model",
        "Report the architecture, tensors, tokenizer and defaults of a model on disk.",
        "noria inspect smollm2",
    ),
    "doctor": _Command(
        doctor_command,
        "report the hardware and software of this machine",
        "Report the hardware and software that noria can use on this machine, and what to install "
        "for more.",
        "noria doctor --json",
    ),
}
_EXIT_CODES = """exit codes:
  0    every row has a result
  1    some rows ended as errors
  2    an option, an input or a configuration cannot be used
  3    a model or a checkpoint cannot be used
  4    a graph does not compile, or something does not fit into memory
  75   stopped; the same command resumes the job
  130  interrupted"""


class _Parser(argparse.ArgumentParser):
    """A parser that escapes control characters in its error messages."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def command_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; `run` of its options is the function of the subcommand."""
    parser = _Parser(
        prog="noria",
        description="Define-then-run LLM batch inference on JAX.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"noria {version('noria')}")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        subparser = commands.add_parser(
            name,
            help=command.help,
            description=command.description,
            epilog=f"example: {command.example}",
        )
        command.module.add_options(subparser)
        subparser.set_defaults(run=command.module.run)
    return parser
