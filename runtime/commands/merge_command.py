"""`noria merge`: join the finished parts of a job."""

import argparse

from ..files.remote import path_or_url
from .shared_options import add_quiet, add_work_folder


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add(
        "parts",
        nargs="+",
        type=path_or_url,
        metavar="PART",
        help="output files or URLs of all N parts, in any order",
    )
    add(
        "-o",
        "--output",
        type=path_or_url,
        required=True,
        help="file or URL for the results, in input order",
    )
    add_work_folder(parser)
    add(
        "--error-file",
        type=path_or_url,
        help="file or URL for error rows, which are then left out of the output",
    )
    add_quiet(parser)


def run(options: argparse.Namespace) -> int:
    """Merge the parts and return the exit code."""
    from ..batch.merge import merge
    from ..batch.remote_files import Outputs, files_copied
    from ..files.disk import Disk
    from ..progress.progress import Progress

    progress = Progress(is_quiet=options.quiet)
    outputs = Outputs.at(options.output, options.error_file, options.work_folder)
    with (
        files_copied(options.parts, with_manifests=True) as parts,
        outputs.mirrored(Disk(), progress.note),
    ):
        outputs.check([("a part", path) for path in parts])
        return merge(parts, outputs.output, error_file=outputs.error_file, progress=progress)
