"""A bundle: a plan with its executables; a start from it compiles none.

`plan.toml` is the plan, `bundle.json` says what all was built for and the files' hashes, `graphs/`
has executables. They are pickles, so they are opened only where nobody
else can have written them: folder and files must be the user's own, writable by no one else,
outside the model's directory, and exactly those that `bundle.json` names. They must also have been
built by these very versions, sources and flags, for these devices. Whatever does not hold is said,
and the bundle is not used.

Each process of a pod has its own, in `process-I-of-N/` of the folder.

Knows nothing of requests. Guarantees: a bundle is whole or not there, as `bundle.json` comes last.
"""

import json
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...compile.compiled_graphs import CompiledGraphs, graph_names
from ...compile.plan import Plan
from ...compile.targets import Target
from ...modelzoo.config import DecoderConfig
from ..batch.job_files import check_fillable
from ..devices.graph_memory import memory_facts
from ..errors import BundleUnusable, ConfigError
from ..files.disk import Disk, digest_file, replace_file, temporary_name
from ..files.own_files import KeptFile, opened, read_file, read_kept
from ..files.run_config import PLAN
from ..pods.peers import ALONE, Peers
from .key import check_key, key_of
from .loading import dump

SCHEMA = 3
CONTENTS, GRAPHS = "bundle.json", "graphs"
FILES = {PLAN, CONTENTS, GRAPHS}
UNFINISHED = {temporary_name(name) for name in (PLAN, CONTENTS)}
"""What an end in the middle of writing may leave."""


@dataclass(frozen=True)
class Contents:
    """`bundle.json`, as far as loading needs it."""

    key: Mapping[str, str]
    graphs: Mapping[str, KeptFile]


@dataclass(frozen=True)
class Bundle:
    """A folder that `write` has filled, and that was built for this plan, target and model."""

    folder: Path
    plan: Plan
    target: Target
    contents: Contents
    dumped: Mapping[str, bytes]
    """Every executable by name, as it was written."""

    @classmethod
    def open(
        cls, folder: Path, plan: Plan, target: Target, config: DecoderConfig, model_path: Path
    ) -> "Bundle":
        """The bundle of a folder; `BundleUnusable` where it is not trusted or not for this.

        Executables are read here: a thread of their own would wait, file by file, for one that
        keeps the interpreter busy.
        """
        if _is_inside_model(folder, model_path):
            raise BundleUnusable("it lies in the model's directory, from which nothing is run")
        with _said(folder), opened(folder) as descriptor:
            contents = _contents(read_file(CONTENTS, descriptor))
            check_key(contents.key, key_of(plan, target, config))
            if missing := graph_names(plan.buckets) ^ set(contents.graphs):
                raise BundleUnusable(
                    f"its executables are not those of the plan ({sorted(missing)})"
                )
            with opened(GRAPHS, descriptor) as graphs:
                dumped = {name: read_kept(file, graphs) for name, file in contents.graphs.items()}
        return cls(folder, plan, target, contents, dumped)


def check_folder(folder: Path, model_path: Path, peers: Peers = ALONE) -> None:
    """Refuse a folder for a bundle before anything is compiled for it."""
    if _is_inside_model(folder, model_path):
        raise ConfigError(
            f"{folder}: expected a folder outside the model's directory, from which no executable "
            f"is run. Choose another."
        )
    check_fillable(folder)
    own = [own_folder(folder, rank, peers.size) for rank in range(peers.size)]
    if peers.size > 1:
        _check_names(folder, {path.name for path in own})
    _check_names(own[peers.rank], FILES | UNFINISHED)


def own_folder(folder: Path, rank: int, size: int) -> Path:
    """Where a process has its bundle: the folder itself, or one in it for each of a pod."""
    return folder if size == 1 else folder / f"process-{rank}-of-{size}"


def tables_in(folder: Path) -> dict[str, Path]:
    """The files of a bundle that users may also give to commands on their own, by description."""
    return {"the bundle's plan": folder / PLAN, "the bundle's table": folder / CONTENTS}


def _check_names(folder: Path, known: Set[str]) -> None:
    """Refuse a folder with others; an interrupted bundle need not have all."""
    if folder.exists() and {path.name for path in folder.iterdir()} - known:
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
    """Fill a folder, whose earlier bundle is replaced. See `check_folder` for which folders.

    Args:
      folder: Where the bundle lies; it is made for the user alone.
      plan: The plan of all graphs.
      target: The devices that they were compiled for. See `keeps` for which executables are kept.
      config: The model.
      graphs: The executables.
      seconds: The time that each of them took to compile.
    """
    disk = Disk()
    _empty(disk, folder)
    described = {}
    for number, (name, executable) in enumerate(graphs.executables.items()):
        described[name] = {"compile_seconds": seconds[name], **memory_facts(executable)}
        if keeps(target):
            path = folder / GRAPHS / f"{number:03}.bin"
            replace_file(disk, path, [dump(executable)])
            described[name] |= KeptFile(path.name, digest_file(path).sha256).described
    replace_file(disk, folder / PLAN, [plan.to_toml().encode()])
    contents = {
        "schema": SCHEMA,
        "executable": keeps(target),
        "key": key_of(plan, target, config),
        "graphs": described,
    }
    replace_file(disk, folder / CONTENTS, [json.dumps(contents, indent=1).encode() + b"\n"])


def keeps(target: Target) -> bool:
    """Whether bundles keep the executables of a target.

    Those for a TPU that is not there are kept, under a key that names the version of the compiler.
    NOTE: whether a TPU loads an executable that was compiled without one has not been tried.
    """
    return target.is_present or target.platform == "tpu"


def _empty(disk: Disk, folder: Path) -> None:
    """Make the folders of a bundle, the user's alone, without the files of an earlier one."""
    for path in (folder, folder / GRAPHS):
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    for name in (CONTENTS, *UNFINISHED):
        disk.remove(folder / name)
    for old in (folder / GRAPHS).iterdir():
        disk.remove(old)


@contextmanager
def _said(folder: Path) -> Iterator[None]:
    """What the disk refuses, as a reason not to use a bundle."""
    try:
        yield
    except OSError as error:
        raise BundleUnusable(f"{error.filename or folder}: {error.strerror}") from None


def _is_inside_model(folder: Path, model_path: Path) -> bool:
    model = model_path.resolve()
    return folder.resolve().is_relative_to(model if model.is_dir() else model.parent)


def _contents(text: bytes) -> Contents:
    try:
        contents = json.loads(text)
        if contents["schema"] != SCHEMA:
            raise BundleUnusable(
                f"{CONTENTS}: expected schema {SCHEMA}, got {contents['schema']!r}"
            )
        if not contents["executable"]:
            raise BundleUnusable(
                "it has no executables, as they were compiled for a target that was not there"
            )
        graphs = {str(name): KeptFile.of(graph) for name, graph in contents["graphs"].items()}
        return Contents(dict(contents["key"]), graphs)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, BundleUnusable):
            raise
        raise BundleUnusable(f"{CONTENTS} cannot be read") from None
