"""`noria convert`: write a model of any format as an orbax checkpoint of noria.

All parameters are loaded at once, as for a job on the CPU, so they must fit into memory.
Guarantees: only a new or empty folder outside the model's directory is written to; the folder
becomes a checkpoint only when it is complete; a model that changes while it is read is an error.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..console import GIGABYTE, note, plural, tell
from ..files.file_checks import check_new_folder
from .shared_options import add_model, add_quiet, add_stored_dtype, stored_dtype

if TYPE_CHECKING:
    from ..checkpoint import ModelFiles


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add_model(parser)
    add("-o", "--output", type=Path, required=True, help="new folder for the checkpoint")
    add_stored_dtype(parser, "the stored weights")
    add_quiet(parser)


def run(options: argparse.Namespace) -> int:
    """Read the model, write the checkpoint, and print its size."""
    from ..checkpoint import open_model
    from ..devices import backends

    say = partial(note, is_quiet=options.quiet)
    with open_model(options.model) as files:
        check_new_folder(options.output, files.path)
        backends.prepare_jax("cpu")
        files.unread.report(partial(tell, sys.stderr), is_strict=options.strict_config)
        _convert(files, options.output, options.dtype, say)
    return 0


def _convert(files: "ModelFiles", folder: Path, dtype: str, say: Callable[[object], None]) -> None:
    from ...compile.targets import find_target
    from .. import session
    from ..checkpoint import save_orbax

    dtype = stored_dtype(files, dtype)
    digest = files.weights_digest()
    digest.start()
    options = session.LoadOptions(dtype, in_panels=False)
    loaded = session.load_model(files, find_target("cpu"), options, say=say)
    # raises an error if a file has changed since it was opened
    digest.result()
    save_orbax(
        folder,
        loaded.parameters,
        family=files.spec.family,
        config=files.spec.config,
        name=files.name,
        generation_defaults=files.generation_defaults,
        tokenizer_files=files.tokenizer_files,
    )
    num_bytes = sum(array.nbytes for array in loaded.parameters.values())
    parameters = plural(len(loaded.parameters), "array")
    tell(sys.stdout, f"{folder}: {parameters} in {dtype}, {num_bytes / GIGABYTE:.2f} GB")
