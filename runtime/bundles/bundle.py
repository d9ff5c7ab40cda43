"""Writes and reads bundles: a plan with its executables, from which a start compiles nothing.

`plan.toml` is the plan, `bundle.json` has the key of the executables and the hashes of their files,
`graphs/` has the executables. Executables are pickles, so they are loaded only if nobody else can
have written them: the folder and the files must belong to the user, be writable by nobody else, lie
outside the model's directory, and be exactly the files in `bundle.json`. The executables must also
have been built by the same versions, sources and flags, for the same devices. If a condition does
not hold, the bundle is not used, and a note says why. Of a bundle of another plan, the executables
are used whose programs read the same values of the plan.

Each process of a pod has a bundle of its own in `process-I-of-N/` of the folder.

Does not know about requests. Guarantees: a bundle is complete or absent, as `bundle.json` is
written last.
"""

import json
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...compile.compiled_graphs import CompiledGraphs
from ...compile.graphs.graph_kinds import GraphKey, graph_keys, read_values
from ...compile.plan import Plan
from ...compile.targets import Target
from ...modelzoo.config import DecoderConfig
from ..devices.graph_memory import memory_facts
from ..errors import BundleUnusable, ConfigError
from ..files.disk import Disk, digest_file, replace_file, temporary_name
from ..files.file_checks import check_fillable
from ..files.own_files import RecordedFile, open_own_folder, read_file, read_recorded
from ..files.run_config import PLAN
from ..plans.plan_facts import plan_table
from ..pods.peers import ALONE, Peers
from .executable_cache import dump
from .key import check_key, key_of

SCHEMA = 3
CONTENTS, GRAPHS = "bundle.json", "graphs"
FILES = {PLAN, CONTENTS, GRAPHS}
UNFINISHED = {temporary_name(name) for name in (PLAN, CONTENTS)}
"""Temporary files that an interrupted `write` may leave."""


@dataclass(frozen=True)
class Contents:
    """The part of `bundle.json` that loading needs."""

    key: Mapping[str, str]
    plan: Mapping[str, Any]
    """The table of the plan in the key."""
    graphs: Mapping[str, RecordedFile]


@dataclass(frozen=True)
class Bundle:
    """The executables in a folder written by `write` for a plan, a target and a model."""

    dumped: Mapping[GraphKey, bytes]
    """The bytes of the executables that can be used."""
    refusal: str
    """The reason why others cannot be used; empty if all can."""

    @classmethod
    def open(
        cls, folder: Path, plan: Plan, target: Target, config: DecoderConfig, model_path: Path
    ) -> "Bundle":
        """Open the bundle in a folder, and read its executables.

        Executables are read here and not in a thread, which would wait at every file for another
        thread that holds the interpreter's lock.

        Raises:
          BundleUnusable: The bundle is not trusted, or was built for something else.
        """
        if _is_inside_model(folder, model_path):
            raise BundleUnusable("it is inside the model's directory, from which nothing is run")
        if folder.is_symlink():
            raise BundleUnusable("it is a link; give the folder to which it leads")
        try:
            with open_own_folder(folder) as descriptor:
                contents = _contents(read_file(CONTENTS, descriptor))
                files, refusal = _usable(contents, plan, key_of(plan, target, config))
                with open_own_folder(GRAPHS, descriptor) as graphs:
                    dumped = {key: read_recorded(file, graphs) for key, file in files.items()}
        except OSError as error:
            raise BundleUnusable(f"{error.filename or folder}: {error.strerror}") from None
        return cls(dumped, refusal)


def _usable(
    contents: Contents, plan: Plan, wanted: Mapping[str, str]
) -> tuple[dict[GraphKey, RecordedFile], str]:
    """The executables for a plan and its key, and the reason why others cannot be used."""
    graphs = {str(key): key for key in graph_keys(plan.buckets)}
    files = {key: contents.graphs[name] for name, key in graphs.items() if name in contents.graphs}
    missing = graphs.keys() ^ contents.graphs.keys()
    if missing and contents.key == wanted:
        names = sorted(missing)
        raise BundleUnusable(f"its executables differ from the graphs of the plan ({names})")
    if {**contents.key, "plan": wanted["plan"]} != wanted:
        check_key(contents.key, wanted)
    then, now = contents.plan, plan_table(plan)
    same = {k: files[k] for k in files if read_values(then, k) == read_values(now, k)}
    lost = [name for name, key in graphs.items() if key not in same]
    try:
        if lost:
            check_key(contents.key, wanted)
    except BundleUnusable as error:
        if not same:
            raise
        return same, f"it has no {', '.join(lost)} for this plan: {error}"
    return same, ""


def check_folder(folder: Path, model_path: Path, peers: Peers = ALONE) -> None:
    """Check the folder for a new bundle, before anything is compiled for it.

    Raises:
      ConfigError: The folder is inside the model's directory, cannot be written to, or has other
        files.
    """
    if _is_inside_model(folder, model_path):
        raise ConfigError(
            f"{folder}: expected a folder outside the model's directory, from which no executable "
            f"is run, got one inside. Choose another folder."
        )
    check_fillable(folder)
    folders = [own_folder(folder, rank, peers.size) for rank in range(peers.size)]
    if peers.size > 1:
        _check_names(folder, {path.name for path in folders})
    _check_names(folders[peers.rank], FILES | UNFINISHED)


def own_folder(folder: Path, rank: int, size: int) -> Path:
    """The folder of a process's bundle: the folder itself, or in a pod a folder inside it."""
    return folder if size == 1 else folder / f"process-{rank}-of-{size}"


def _check_names(folder: Path, known: Set[str]) -> None:
    """Refuse a folder with files of other names."""
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
    seconds: Mapping[GraphKey, float],
) -> None:
    """Write a bundle into a folder that passes `check_folder`; an earlier bundle is replaced.

    Args:
      folder: The folder of the bundle; only the user can read it.
      plan: The plan of the graphs.
      target: The target of the graphs. Executables are stored only if `keeps(target)`.
      config: The model's configuration.
      graphs: The executables.
      seconds: Compile seconds of each graph.
    """
    disk = Disk()
    _empty(disk, folder)
    described = {}
    for number, (key, executable) in enumerate(graphs.executables.items()):
        facts = {"compile_seconds": seconds[key], **memory_facts(executable)}
        if keeps(target):
            path = folder / GRAPHS / f"{number:03}.bin"
            replace_file(disk, path, [dump(executable)])
            facts |= RecordedFile(path.name, digest_file(path).sha256).to_table()
        described[str(key)] = facts
    replace_file(disk, folder / PLAN, [plan.to_toml().encode()])
    contents = {
        "schema": SCHEMA,
        "executable": keeps(target),
        "key": key_of(plan, target, config),
        "graphs": described,
    }
    replace_file(disk, folder / CONTENTS, [json.dumps(contents, indent=1).encode() + b"\n"])


def keeps(target: Target) -> bool:
    """Whether bundles store the executables of a target.

    Executables for an absent TPU are stored too; their key has the version of the compiler.
    NOTE: it was not tested whether a TPU loads an executable that was compiled without a TPU.
    """
    return target.is_present or target.platform == "tpu"


def _empty(disk: Disk, folder: Path) -> None:
    """Create the folders of a bundle for the user alone, and remove files of an earlier bundle."""
    for path in (folder, folder / GRAPHS):
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o700)
    for name in (CONTENTS, *UNFINISHED):
        disk.remove(folder / name)
    for old in (folder / GRAPHS).iterdir():
        disk.remove(old)


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
            raise BundleUnusable("it has no executables, as it was compiled for an absent target")
        graphs = {
            str(name): RecordedFile.from_table(graph) for name, graph in contents["graphs"].items()
        }
        return Contents(dict(contents["key"]), json.loads(contents["key"]["plan"]), graphs)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, BundleUnusable):
            raise
        raise BundleUnusable(f"{CONTENTS} is malformed") from None
