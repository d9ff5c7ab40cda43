"""`noria batch`: answer each row of a file."""

import argparse
import re
from pathlib import Path

from ..files.remote import path_or_url
from . import pod_arguments
from .shared_options import (
    add_adapters,
    add_dtype,
    add_layout,
    add_model,
    add_overrides,
    add_quiet,
    add_work_folder,
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    _add_files(parser)
    _add_columns(parser)
    _add_model(parser)
    _add_requests(parser)
    _add_run(parser)
    several = parser.add_argument_group("several processes over one mesh")
    pod_arguments.add_options(several)
    several.add_argument(
        "--allow-different-numerics",
        action="store_true",
        help="continue a job that other processes or devices began, on those that are there; "
        "finished rows are kept, and the manifest names every set-up",
    )


def _add_files(parser: argparse.ArgumentParser) -> None:
    """Add the options of the input and of the outputs."""
    add = parser.add_argument
    add(
        "-i",
        "--input",
        type=path_or_url,
        required=True,
        help="file or URL with requests: OpenAI Batch lines or simple lines (.jsonl), or a table "
        "of prompts (.csv, .tsv, .parquet); names of lines and CSV may end in .gz or .zst; - is "
        "standard input",
    )
    add(
        "-o",
        "--output",
        type=path_or_url,
        required=True,
        help="file or URL for the results, in input order (.jsonl, .jsonl.gz, .jsonl.zst or "
        ".parquet); - is standard output",
    )
    add_work_folder(parser)


def _add_columns(parser: argparse.ArgumentParser) -> None:
    """Add the options of tables, of parts of the rows, and of stages."""
    add = parser.add_argument
    add(
        "--prompt-column",
        action="append",
        default=[],
        metavar="NAME",
        help="column of a table that has the prompts, or the texts to embed; given twice for pairs "
        "of texts (default: the names of the keys of a request, such as prompt or input)",
    )
    add(
        "--id-column",
        metavar="NAME",
        help="column of a table that has the ids (default: custom_id, else id, else row numbers)",
    )
    add(
        "--url",
        metavar="URL",
        help="what the rows of a table ask for, such as chat/completions or embeddings (default: "
        "decided by the names of the columns)",
    )
    add(
        "--carry",
        action="append",
        default=[],
        metavar="COLUMN[=NAME]",
        help="column of a table to copy to the output, there called NAME",
    )
    add(
        "--error-file",
        type=path_or_url,
        help="file or URL for error rows, which are then left out of the output",
    )
    add(
        "--rows",
        default="0/1",
        metavar="I/N",
        help="answer only rows I, I+N, I+2N, ... of the input; noria merge joins the N parts",
    )
    add(
        "--pipeline",
        type=Path,
        metavar="FILE",
        help="TOML file with the stages of a job, which make requests from earlier answers",
    )
    add(
        "--keep-stages",
        action="store_true",
        help="keep the files of all stages, in the folder OUTPUT.stages",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options of the model and of its plan."""
    add = parser.add_argument
    add_model(parser)
    add(
        "--merge-adapter",
        type=Path,
        metavar="DIR",
        help="adapter of peft (LoRA, rsLoRA, DoRA) to merge into the weights while they load",
    )
    add_adapters(parser)
    add(
        "--expect-weights",
        type=weights_digest,
        metavar="SHA256",
        help="digest that the weights must have; noria inspect --weights-digest prints it",
    )
    add(
        "--plan",
        type=Path,
        help="plan file or bundle to use (default: a plan derived from the input)",
    )
    add(
        "--require-bundle",
        action="store_true",
        help="end before weights load, with exit code 2, unless every executable of the bundle "
        "that --plan names can be used",
    )
    add_dtype(parser)
    add(
        "--target",
        help="hardware to run on (default: the target of the plan, else this machine's "
        "accelerator, else cpu)",
    )
    add_layout(parser)
    add_overrides(parser)
    add(
        "--no-sharing",
        dest="shares",
        action="store_false",
        help="compute every prompt whole, even if prompts begin with the same tokens; a given "
        "plan keeps its prefixes",
    )


def _add_requests(parser: argparse.ArgumentParser) -> None:
    """Add the options of what requests leave out, and of what they may have."""
    add = parser.add_argument
    add("--seed", type=int, default=0, help="seed for rows without a seed (default: 0)")
    add(
        "--generation-config",
        choices=("model", "none"),
        default="model",
        help="source of sampling defaults: model, its generation_config.json; none, noria's own "
        "defaults (default: model)",
    )
    add(
        "--sampling",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="sampling parameter of rows that do not have it, such as max_tokens=64",
    )
    add(
        "--form",
        type=Path,
        metavar="FILE",
        help="JSON Schema, or another form, of the answers to rows that ask for none; with "
        "--pipeline, of the answers of its last stage",
    )
    add(
        "--ignore-unknown",
        action="store_true",
        help="ignore keys of requests that noria does not know; by default such rows are errors",
    )
    add(
        "--strict-length",
        action="store_true",
        help="refuse texts to embed that are longer than the max_seq_length of the model; by "
        "default they are cut, as in sentence-transformers",
    )
    add(
        "--now",
        metavar="TIME",
        help="local time that chat templates see, such as 2026-01-31T12:00:00 (default: the start "
        "of the job); give all parts of a job the same time",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    """Add the options of how the job runs, stops, and shows its progress."""
    add = parser.add_argument
    add(
        "--grace-seconds",
        type=_seconds,
        default=20.0,
        metavar="SECONDS",
        help="seconds to finish running rows after SIGTERM, SIGHUP or Ctrl-C (default: 20)",
    )
    add(
        "--on-error",
        choices=("row", "raise"),
        default="row",
        help="what a bad row does: row, it becomes an error row; raise, it stops the job "
        "(default: row)",
    )
    earlier = parser.add_mutually_exclusive_group()
    earlier.add_argument(
        "--restart",
        action="store_true",
        help="discard the finished rows of an earlier run, and start again",
    )
    earlier.add_argument(
        "--update",
        action="store_true",
        help="update a finished output after a change of the input: unchanged rows keep their "
        "answers, and only new and changed rows run, on the same plan",
    )
    add(
        "--prices",
        type=Path,
        metavar="FILE",
        help="hardware tables with price_per_hour, for the price of the job in its manifest",
    )
    add("--verbose", action="store_true", help="print the whole plan as TOML")
    add_quiet(parser)
    add(
        "--progress-file",
        metavar="FILE",
        help="file, or open descriptor fd:N, that takes the progress as lines of JSON",
    )


def run(options: argparse.Namespace) -> int:
    """Run the job and return its exit code."""
    from .batch_job import run_with_options

    return run_with_options(options)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    # nan is not at least 0 either
    if not seconds >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return seconds


def weights_digest(text: str) -> str:
    """Return a digest in the form that `noria inspect --weights-digest` prints."""
    if re.fullmatch(r"sha256:[0-9a-f]{64}", text) is None:
        raise argparse.ArgumentTypeError(
            f"expected sha256: and 64 hexadecimal digits in lower case, got {text!r}. "
            f"noria inspect MODEL --weights-digest prints it."
        )
    return text
