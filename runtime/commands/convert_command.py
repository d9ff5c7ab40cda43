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

from ..batch.job_files import check_fillable
from ..console import note, plural, tell
from ..errors import ConfigError
from .shared_options import add_model

if TYPE_CHECKING:
    from ..checkpoint import ModelFiles

GIGABYTE = 1e9


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    add = parser.add_argument
    add_model(parser)
    add("-o", "--output", type=Path, required=True, help="new folder for the checkpoint")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="dtype of the stored weights (default: auto, bfloat16 if all tensors are bfloat16, "
        "else float32)",
    )
    add("--quiet", action="store_true", help="print nothing on stderr")


def run(options: argparse.Namespace) -> int:
    """Read the model, write the checkpoint, and print its size."""
    from .. import session
    from ..checkpoint import open_model

    say = partial(note, options)
    with open_model(options.model) as files:
        _check_folder(options.output, files.path)
        session.prepare_jax("cpu")
        files.unread.report(say, is_strict=options.strict_config)
        _convert(files, options.output, options.dtype, say)
    return 0


def _convert(files: "ModelFiles", folder: Path, dtype: str, say: Callable[[object], None]) -> None:
    from ...compile.targets import find_target
    from .. import session
    from ..checkpoint import save_orbax

    dtype = _stored_dtype(files) if dtype == "auto" else dtype
    digest = files.weights_digest()
    digest.start()
    loaded = session.load_model(files, find_target("cpu"), dtype, say=say)
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


def _stored_dtype(files: "ModelFiles") -> str:
    """The narrower of bfloat16 and float32 that holds all tensors without rounding."""
    dtypes = {info.dtype.name for info in files.tensors.tensors.values()}
    return "bfloat16" if dtypes == {"bfloat16"} else "float32"


def _check_folder(folder: Path, model: Path) -> None:
    """Refuse a folder with files or inside a model's directory, before any weights are read."""
    if model.is_dir() and folder.resolve().is_relative_to(model.resolve()):
        raise ConfigError(
            f"{folder}: expected a folder outside the model's directory, which is only read. "
            f"Choose another folder."
        )
    check_fillable(folder)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(
            f"{folder}: expected a new or empty folder, got one with files, and no file is "
            f"overwritten. Choose another folder, or remove this one if an earlier command did "
            f"not finish it."
        )
