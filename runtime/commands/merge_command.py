"""`noria merge`: join the finished parts of a job."""

import argparse
from pathlib import Path


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add(
        "parts",
        nargs="+",
        type=Path,
        metavar="PART",
        help="output files of all N parts, in any order",
    )
    add("-o", "--output", type=Path, required=True, help="file for the results, in input order")
    add(
        "--error-file", type=Path, help="file for error rows, which are then left out of the output"
    )
    add("--quiet", action="store_true", help="print nothing on stderr")


def run(options: argparse.Namespace) -> int:
    """Merge the parts and return the exit code."""
    from ..batch.merge import merge
    from ..batch.progress import Progress

    progress = Progress(is_quiet=options.quiet)
    return merge(options.parts, options.output, error_file=options.error_file, progress=progress)
