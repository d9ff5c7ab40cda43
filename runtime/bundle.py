"""A bundle: a plan and its executables in a folder, so that a later start compiles nothing.

`plan.toml` is the plan, `bundle.json` says what the executables were built for and their hashes,
`graphs/` has them. Executables are pickles, so they are opened only where nobody else can have
written them: folder and files must be the user's own, writable by no one else, outside the model's
directory, and exactly those that `bundle.json` names. They must also have been built by these very
versions, sources and flags, for these devices. Whatever does not hold is said, and the plan is
compiled instead.

Knows nothing of requests. Guarantees: a bundle is whole or not there, as `bundle.json` comes last.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import jax

from .. import compile as compile_floor
from .. import modelzoo, sharding
from ..compile import serialised
from ..compile.compiled_graphs import CompiledGraphs, graph_names
from ..compile.plan import Plan
from ..compile.targets import Target
from ..modelzoo.config import DecoderConfig
from .batch.disk import Disk, digest_file, replace_file
from .batch.manifest import versions
from .machine import processor_flags
from .plan_files import PLAN
from .run_config import ConfigError

SCHEMA = 1
CONTENTS, GRAPHS = "bundle.json", "graphs"
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


class BundleUnusable(ValueError):
    """Why the executables of a bundle are not used."""


@dataclass(frozen=True)
class Bundle:
    """A folder that `write` has filled."""

    folder: Path

    def load(
        self, plan: Plan, target: Target, config: DecoderConfig, model_path: Path
    ) -> CompiledGraphs:
        """The executables; `BundleUnusable` unless all of them are trusted and built for this."""
        if _is_inside_model(self.folder, model_path):
            raise BundleUnusable("it lies in the model's directory, from which nothing is run")
        try:
            dumped = self._read(key_of(plan, target, config))
        except OSError as error:
            raise BundleUnusable(f"{error.filename or self.folder}: {error.strerror}") from None
        missing = graph_names(plan.buckets) ^ set(dumped)
        if missing:
            raise BundleUnusable(f"its executables are not those of the plan ({sorted(missing)})")
        load = partial(serialised.load, devices=target.devices)
        try:
            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                loaded = list(pool.map(load, dumped.values()))
        except (RuntimeError, ValueError, EOFError, UnpicklingError) as error:
            raise BundleUnusable(f"its executables cannot be loaded ({error})") from error
        return CompiledGraphs(plan.buckets, dict(zip(dumped, loaded, strict=True)))

    def _read(self, key: Mapping[str, str]) -> dict[str, bytes]:
        """The executables built for a key, each read from the very file whose owner was checked.

        Folders are held open, so nobody who can rename them can put others in their place.
        """
        with _opened(self.folder) as folder:
            contents = _contents(_read_file(CONTENTS, folder))
            _check_key(contents["key"], key)
            with _opened(GRAPHS, folder) as graphs:
                dumped = {
                    name: _read_file(file, graphs) for name, (file, _) in contents["files"].items()
                }
        for name, (file, sha256) in contents["files"].items():
            if hashlib.sha256(dumped[name]).hexdigest() != sha256:
                raise BundleUnusable(f"{GRAPHS}/{file} is not the file that was written")
        return dumped


def check_folder(folder: Path, model_path: Path) -> None:
    """Refuse a folder for a bundle before anything is compiled for it."""
    if _is_inside_model(folder, model_path):
        raise ConfigError(
            f"{folder}: expected a folder outside the model's directory, from which no executable "
            f"is run. Choose another."
        )
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: expected a folder, got a file. Choose another name.")
    others = {path.name for path in folder.iterdir()} if folder.exists() else set()
    # an interrupted bundle has no contents yet
    if others - {PLAN, CONTENTS, GRAPHS}:
        raise ConfigError(
            f"{folder}: expected a new folder or a bundle, got one with other files. Choose "
            f"another folder."
        )


def write(
    folder: Path,
    plan: Plan,
    target: Target,
    config: DecoderConfig,
    graphs: CompiledGraphs,
    seconds: Mapping[str, float],
) -> None:
    """Fill a folder, whose earlier bundle is replaced; executables only for a target that is there.

    `seconds` are those that each graph took to compile. See `check_folder` for which folders.
    """
    disk = Disk()
    for path in (folder, folder / GRAPHS):
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    disk.remove(folder / CONTENTS)
    for old in (folder / GRAPHS).iterdir():
        disk.remove(old)
    dumped = serialised.dump(graphs) if target.is_present else {}
    described = {}
    for number, (name, executable) in enumerate(graphs.executables.items()):
        described[name] = {"compile_seconds": seconds[name], **_memory(executable)}
        if name in dumped:
            path = folder / GRAPHS / f"{number:03}.bin"
            replace_file(disk, path, [dumped[name]])
            digest = digest_file(path)
            described[name] |= {"file": path.name, "sha256": digest.sha256}
    replace_file(disk, folder / PLAN, [plan.to_toml().encode()])
    contents = {
        "schema": SCHEMA,
        "executable": target.is_present,
        "key": key_of(plan, target, config),
        "graphs": described,
    }
    replace_file(disk, folder / CONTENTS, [json.dumps(contents, indent=1).encode() + b"\n"])


def key_of(plan: Plan, target: Target, config: DecoderConfig) -> dict[str, str]:
    """Everything that an executable depends on."""
    device = target.devices[0]
    return {
        **{f"version of {name}": number for name, number in versions().items()},
        "compiler": str(device.client.platform_version) if target.is_present else "",
        "devices": f"{len(target.devices)} x {device.device_kind}",
        "processes": str(jax.process_count()),
        # code for a CPU uses the instructions of the one it was compiled on
        "processor": _digest(processor_flags()) if target.platform == "cpu" else "",
        **{name: os.environ.get(name, "") for name in _FLAGS},
        "sources": _source_fingerprint(),
        "plan": _digest(plan.to_toml()),
        "model": _digest(repr(config)),
    }


def _is_inside_model(folder: Path, model_path: Path) -> bool:
    model = model_path.resolve()
    return folder.resolve().is_relative_to(model if model.is_dir() else model.parent)


@contextmanager
def _opened(path: Path | str, folder: int | None = None) -> Iterator[int]:
    """A folder as a descriptor, the user's own."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        _check_own(path, descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def _read_file(name: str, folder: int) -> bytes:
    """A file of a folder that is held open, the user's own; links are not followed."""
    descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    with os.fdopen(descriptor, "rb") as file:
        _check_own(name, descriptor)
        return file.read()


def _check_own(path: Path | str, descriptor: int) -> None:
    """Only the user may have written it."""
    found = os.fstat(descriptor)
    if found.st_uid != os.geteuid():
        raise BundleUnusable(f"{path} belongs to another user ({found.st_uid})")
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise BundleUnusable(
            f"{path} can be written by others ({stat.filemode(found.st_mode)}); chmod go-w it if "
            f"none of them has"
        )


def _contents(text: bytes) -> Mapping[str, Any]:
    """The key, and the file and hash of every graph."""
    try:
        contents = json.loads(text)
        if contents["schema"] != SCHEMA:
            raise BundleUnusable(
                f"{CONTENTS}: expected schema {SCHEMA}, got {contents['schema']!r}"
            )
        if not contents["executable"]:
            raise BundleUnusable("it was compiled for a target that was not there")
        files = {
            str(name): (Path(graph["file"]).name, str(graph["sha256"]))
            for name, graph in contents["graphs"].items()
        }
        return {"key": dict(contents["key"]), "files": files}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, BundleUnusable):
            raise
        raise BundleUnusable(f"{CONTENTS} cannot be read") from None


def _check_key(built_for: Mapping[str, str], wanted: Mapping[str, str]) -> None:
    names = sorted(set(built_for) | set(wanted))
    if differing := [name for name in names if built_for.get(name) != wanted.get(name)]:
        listed = "; ".join(
            f"{name}: {built_for.get(name)!r} then, {wanted.get(name)!r} now" for name in differing
        )
        raise BundleUnusable(f"it was built for something else ({listed})")


def memory_of(executable: jax.stages.Compiled) -> int:
    """Bytes that a graph needs on each device with all that it is given; 0 where none are known."""
    found = _memory(executable)
    if not found:
        return 0
    return sum(found.values()) - 2 * found["alias_bytes"]


def _memory(executable: jax.stages.Compiled) -> dict[str, Any]:
    memory = executable.memory_analysis()
    if memory is None:
        return {}
    return {
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
    }


def _source_fingerprint() -> str:
    """Of every source file that a graph is made from."""
    digest = hashlib.sha256()
    for floor in (modelzoo, sharding, compile_floor):
        root = Path(next(iter(floor.__path__)))
        for path in sorted(root.rglob("*.py")):
            digest.update(f"{floor.__name__} {path.relative_to(root)}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
