"""`noria compare`: how far the predictions of models or number formats are from a reference.

All models read the same tokens: the first model's greedy answers to the prompts of a batch file, or
the rows' own tokens. Writes `compare.json`, `compare.md` and `compare.png` into the output folder,
and prints the table.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..console import note, tell
from ..devices.default_target import default_target
from ..errors import ConfigError
from ..files.file_checks import check_files, check_fillable
from ..files.layout_files import layout_file
from .shared_options import (
    add_dtype,
    add_layout,
    add_model,
    add_overrides,
    add_quiet,
    read_numbers,
)

if TYPE_CHECKING:
    from ..comparison.compare import ComparedModel, Comparison


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add_model(parser)
    add(
        "--against",
        action="append",
        default=[],
        metavar="MODEL",
        help="model to compare with --model; may be given several times",
    )
    add(
        "--numbers",
        action="append",
        default=[],
        metavar="NUMBERS",
        help="number format of each model, in order: float, int8, float8, int4:64 (groups of 64), "
        "or keys of [numbers] such as weights=int4,group=64,dtype=bfloat16; without --against, "
        "each is for --model",
    )
    add("-i", "--input", type=Path, required=True, help="batch file with prompts")
    add("-o", "--output", type=Path, required=True, help="folder for compare.json, .md and .png")
    add(
        "--max-tokens",
        type=int,
        default=64,
        metavar="N",
        help="tokens of the first model's greedy answer to each prompt, which all models read; 0 "
        "compares over the prompts' own tokens (default: 64)",
    )
    add("--rows", type=int, metavar="N", help="use only the first N rows (default: all rows)")
    add("--slots", type=int, default=16, help="rows that run at once (default: 16)")
    add_dtype(parser)
    add("--target", default=default_target(), help="hardware to run on (default: %(default)s)")
    add_layout(parser)
    add_overrides(parser)
    add_quiet(parser)


def run(options: argparse.Namespace) -> int:
    """Compare the models, write the report, and print the table."""
    from ..bundles import compilation_cache
    from ..checkpoint import open_model
    from ..comparison import report
    from ..comparison.compare import compare
    from ..devices import backends
    from ..files import png_figure
    from ..rows.job_text import read_row_ids

    models = _models(options)
    _check(options)
    say = partial(note, is_quiet=options.quiet)
    png_figure.matplotlib()
    check_fillable(options.output)
    read = [options.input, layout_file(options.layout or "")]
    read += [Path(model.model) for model in models]
    files = report.files_in(options.output)
    check_files({}, [("an input", path) for path in read], files)
    backends.prepare_jax(options.target)
    with open_model(options.model) as opened:
        opened.unread.report(partial(tell, sys.stderr), is_strict=options.strict_config)
        opened.check_generates()
        rows = read_row_ids(options.input, opened)[: options.rows]
    compilation_cache.enable(partial(tell, sys.stderr))
    comparison = compare(
        models,
        rows,
        max_tokens=options.max_tokens,
        dtype=options.dtype,
        target=options.target,
        layout=options.layout,
        slots=options.slots,
        overrides=options.set,
        say=say,
    )
    _write(comparison, options.output)
    return 0


def _models(options: argparse.Namespace) -> "list[ComparedModel]":
    """The models with their number formats, the reference first."""
    from ..comparison.compare import ComparedModel

    names = [options.model, *options.against]
    tables = [read_numbers(text) for text in options.numbers] or [{}]
    if len(names) == 1:
        names *= len(tables)
    elif len(tables) == 1:
        tables *= len(names)
    if len(names) < 2 or len(names) != len(tables):
        raise ConfigError(
            f"--against, --numbers: expected two models or more, and --numbers not at all, once, "
            f"or once for each model, got {len(names)} models and {len(options.numbers)} numbers. "
            f"Give --against MODEL, or --numbers float --numbers int8."
        )
    return [ComparedModel(*pair) for pair in zip(names, tables, strict=True)]


def _check(options: argparse.Namespace) -> None:
    """Refuse numbers outside of their ranges."""
    least = {"--max-tokens": (options.max_tokens, 0), "--slots": (options.slots, 1)}
    if options.rows is not None:
        least["--rows"] = options.rows, 1
    for name, (number, smallest) in least.items():
        if number < smallest:
            raise ConfigError(f"{name}: expected at least {smallest}, got {number}.")


def _write(comparison: "Comparison", folder: Path) -> None:
    from ..comparison import report
    from ..files.disk import Disk, replace_file

    table = report.markdown(comparison)
    # the table is printed first, as writing the files may fail
    tell(sys.stdout, table.rstrip())
    content = json.dumps(report.to_json(comparison), indent=1) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    contents = content.encode(), table.encode(), report.draw(comparison)
    paths = report.files_in(folder).values()
    for path, data in zip(paths, contents, strict=True):
        replace_file(Disk(), path, [data])
    tell(sys.stdout, ", ".join(map(str, paths)))
