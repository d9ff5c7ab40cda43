"""Options that several subcommands have, each defined once."""

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..errors import ConfigError
from ..files.run_config import STRICT_CONFIG, apply_overrides

if TYPE_CHECKING:
    from ..adapters.adapter_set import AdapterSet
    from ..checkpoint import ModelFiles


Options = TypeVar("Options")


def typed(kind: type[Options], options: argparse.Namespace) -> Options:
    """Make the options of a kind, a dataclass with a field of the same name for each of them."""
    return kind(**{field.name: getattr(options, field.name) for field in fields(cast(Any, kind))})


def add_model(parser: argparse.ArgumentParser, *, reads_weights: bool = True) -> None:
    """Add `--model`, and `--strict-config` for its configuration.

    Args:
      parser: The parser of the subcommand.
      reads_weights: Whether the subcommand needs the weights of the model.
    """
    folder = "model directory" if reads_weights else "model directory (config.json is enough)"
    parser.add_argument("--model", required=True, help=f"{folder}, .gguf file, or smollm2")
    add_strict_config(parser)


def add_strict_config(parser: argparse.ArgumentParser) -> None:
    """Add `--strict-config`."""
    parser.add_argument(
        STRICT_CONFIG,
        action="store_true",
        help="refuse a config.json with keys that neither noria nor transformers reads",
    )


def add_adapters(parser: argparse.ArgumentParser) -> None:
    """Add `--adapters`, which `open_adapters` reads."""
    parser.add_argument(
        "--adapters",
        action="extend",
        nargs="+",
        default=[],
        metavar="NAME=DIR",
        help="adapters of peft (LoRA, rsLoRA), of which each row may name one as its model",
    )


def open_adapters(
    given: Sequence[str], model: str, files: "ModelFiles"
) -> "tuple[AdapterSet | None, dict[str, str | None] | None]":
    """Open the adapters that rows of a model may name, each given as `NAME=DIR`.

    Returns:
      The adapters, and the adapter of each `model` that a row may name, as in
      `RequestRules.models`; None and None without adapters.

    Raises:
      ConfigError: A name or a folder is missing, or two adapters or the model have one name.
    """
    from ..adapters.adapter_set import AdapterSet

    paths: dict[str, Path] = {}
    models: dict[str, str | None] = dict.fromkeys((files.name, model))
    for adapter in given:
        name, _, path = adapter.partition("=")
        if not name or not path or name in models:
            raise ConfigError(
                f"--adapters: expected NAME=DIR, with a name that neither the model nor another "
                f"adapter has, got {adapter!r}."
            )
        paths[name], models[name] = Path(path), name
    return (AdapterSet.open(files, paths), models) if paths else (None, None)


def add_dtype(
    parser: argparse.ArgumentParser,
    arrays: str = "weights and activations",
    auto: str = "bfloat16 on TPU and GPU and the faster of the two on the CPU",
) -> None:
    """Add `--dtype` of some arrays, and say what its default means."""
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help=f"dtype of {arrays} (default: auto, {auto})",
    )


def add_stored_dtype(parser: argparse.ArgumentParser, stored: str) -> None:
    """Add `--dtype` of what a command writes, which `stored_dtype` reads."""
    add_dtype(parser, stored, "bfloat16 if all tensors are bfloat16, else float32")


def stored_dtype(files: "ModelFiles", dtype: str, *, rounds_codes: bool = False) -> str:
    """The given dtype; for `auto` the narrower one that holds all tensors without rounding.

    With `rounds_codes`, tensors that are published in codes do not count.
    """
    from ..checkpoint.formats.published_formats import CodedSource

    if dtype != "auto":
        return dtype
    tensors = files.tensors
    in_codes = tensors.kept if rounds_codes and isinstance(tensors, CodedSource) else ()
    dtypes = {info.dtype.name for name, info in tensors.tensors.items() if name not in in_codes}
    return "bfloat16" if dtypes == {"bfloat16"} else "float32"


def read_numbers(text: str) -> dict[str, Any]:
    """Read keys of `[numbers]`: a format of weights, with a group or without, or keys and values.

    >>> read_numbers("int4:64"), read_numbers("weights=int8,dtype=bfloat16")
    ({'weights': 'int4', 'group': 64}, {'weights': 'int8', 'dtype': 'bfloat16'})

    Raises:
      ConfigError: The text is neither.
    """
    weights, colon, group = text.partition(":")
    keys = [f"weights={weights}", *([f"group={group}"] if colon else [])]
    try:
        return apply_overrides({}, text.split(",") if "=" in text else keys)
    except ConfigError:
        raise ConfigError(
            f"--numbers {text}: expected a format such as int8 or int4:64, or keys and values such "
            f"as weights=int4,group=64."
        ) from None


def add_layout(parser: argparse.ArgumentParser) -> None:
    """Add `--layout`."""
    parser.add_argument(
        "--layout",
        help="layout of the model on several devices: NAME, NAME@data=2,tensor=4 or a FILE",
    )


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Add `--set`, which may be given several times."""
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=V",
        help="override a key of the plan, such as buckets.decode_slots=16",
    )


def add_work_folder(parser: argparse.ArgumentParser) -> None:
    """Add `--work-folder` of commands whose outputs may be at URLs."""
    parser.add_argument(
        "--work-folder",
        type=Path,
        default=Path(),
        metavar="DIR",
        help="folder for the journal and the copies of outputs at URLs (default: the current "
        "folder)",
    )


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add `--quiet`, and `--log-times`, which `command_line` reads."""
    parser.add_argument(
        "--log-times", action="store_true", help="begin every line on stderr with the time of day"
    )
    parser.add_argument(
        "--quiet", action="store_true", help="print no progress on stderr, only errors and warnings"
    )
