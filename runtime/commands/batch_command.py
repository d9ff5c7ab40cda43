"""`noria batch`: answer every row of a file."""

import argparse
from pathlib import Path

from ..files.run_config import add_strict_config
from ..pods import pod_options


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
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
    add_strict_config(parser)
    several = parser.add_argument_group("several processes over one mesh")
    pod_options.add_options(several)
    several.add_argument(
        "--allow-different-numerics",
        action="store_true",
        help="go on with a job that another set-up of processes began; the manifest says so",
    )


def run(options: argparse.Namespace) -> int:
    """Run the job and return its exit code."""
    from ..batch.batch_model import run_with_options

    return run_with_options(options)


def _weights_digest(text: str) -> str:
    from ..checkpoint.weights_digest import parse_digest

    try:
        return parse_digest(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
