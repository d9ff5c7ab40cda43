"""The option `--strict-config`, which every subcommand that opens a model has.

Knows nothing of models.
"""

import argparse

OPTION = "--strict-config"


def add_option(parser: argparse.ArgumentParser) -> None:
    """Add the option to a subcommand."""
    parser.add_argument(
        OPTION,
        action="store_true",
        help="refuse a config.json with keys that neither noria nor transformers reads",
    )
