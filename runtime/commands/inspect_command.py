"""`noria inspect`: report the content of a model on disk."""

import argparse
import sys

from ..console import tell
from ..errors import EXIT_OK
from .shared_options import add_strict_config


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument("model", help="model directory, .gguf file, or smollm2")
    parser.add_argument(
        "--weights-digest",
        action="store_true",
        help="also print the digest of all weights, which reads all bytes",
    )
    add_strict_config(parser)


def run(options: argparse.Namespace) -> int:
    """Print the report."""
    from ..checkpoint import open_model
    from ..checkpoint.description import describe

    with open_model(options.model) as files:
        tell(sys.stdout, describe(files, digest_weights=options.weights_digest))
        if options.strict_config:
            files.unread.report(str, is_strict=True)
    return EXIT_OK
