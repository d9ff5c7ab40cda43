"""Starts from stored executables, which load while the weights load.

Executables come from a bundle or from the user's cache. They load in threads and need the
processor, while weights wait for the disk, so together they take only the longer of the two times.
A note says why a bundle cannot be used. Executables that are missing or cannot be loaded are
compiled.
"""

from collections.abc import Callable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax

from ...compile.graphs.graph_kinds import EMPTY_STATE, GraphKey
from ...compile.graphs.steps import DecodeState
from ...compile.plan import Plan
from ...compile.targets import Target
from ..checkpoint import ModelFiles
from ..console import plural
from ..errors import BundleRequired, BundleUnusable
from ..pods.peers import ALONE, Peers
from .bundle import Bundle, own_folder
from .executable_cache import ExecutableCache, LoadError, load_in_background

_NOT_USED = "The bundle is not used; make one in a new folder with noria compile."


class BundleUse(NamedTuple):
    """The executables that a start has from a bundle, and why it has not all of them."""

    executables: int
    reason: str | None


class Stores(NamedTuple):
    """The places of stored executables."""

    bundle: Path | None = None
    """The bundle's folder; None if the user gave none."""
    cache: Path | None = None
    """The cache's folder, into which nobody else can write; None if there is no cache."""
    requires_bundle: bool = False
    """Whether to refuse a start from anything else than the bundle."""


class WarmStart:
    """The stored executables of a plan, which begin to load when this object is constructed.

    All processes of a pod take the same executables, because the compiler of one process may wait
    for the compilers of the others.
    """

    def __init__(
        self,
        stores: Stores,
        plan: Plan,
        target: Target,
        files: ModelFiles,
        on_note: Callable[[str], None],
        peers: Peers = ALONE,
        on_warning: Callable[[str], None] | None = None,
    ):
        """Read the bundle if one is given and usable, else the cache.

        Args:
          stores: The places of the executables.
          plan: The plan of the graphs.
          target: The devices of the executables.
          files: The model.
          on_note: Called with lines about the progress.
          peers: The processes of the job.
          on_warning: Called with the reasons why executables are not used; by default `on_note`.

        Raises:
          BundleRequired: The bundle is required, and one of its executables cannot be used.
        """
        self._on_note, self._peers = on_note, peers
        self._on_warning = on_warning or on_note
        self._requires_bundle = stores.requires_bundle
        self.bundle: BundleUse | None = None
        """The use of the bundle; None if no process was given one."""
        self._loaded: dict[GraphKey, jax.stages.Compiled] | None = None
        config = files.spec.config
        self._cache: ExecutableCache | None = None
        if stores.cache is not None:
            own = own_folder(stores.cache, peers.rank, peers.size)
            self._cache = ExecutableCache(own, plan, target, config, self._on_warning)
        self._folder = stores.bundle
        self._opened = opened = self._open(stores.bundle, plan, target, files)
        dumped = {} if opened is None else dict(opened.dumped)
        if self._cache is not None and (opened is None or opened.refusal):
            dumped = self._cache.read() | dumped
        keys = self._on_all_processes(set(dumped))
        self._loading = load_in_background({key: dumped[key] for key in keys}, target)
        self._state: Future[DecodeState | None] | None = None
        # several processes must start the same programs in the same order, so not in a thread
        if EMPTY_STATE in keys and peers.size == 1:
            background = ThreadPoolExecutor(max_workers=1)
            self._state = background.submit(self._empty_state)
            background.shutdown(wait=False)
        if stores.requires_bundle:
            self.executables()  # before the weights load

    def executables(self) -> dict[GraphKey, jax.stages.Compiled]:
        """The loaded executables; waits until all have loaded."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def _load(self) -> dict[GraphKey, jax.stages.Compiled]:
        bundle = self._opened
        of_bundle = set() if bundle is None else self._loading.keys() & bundle.dumped.keys()
        taken = self._take(f"bundle {self._folder}", of_bundle)
        if bundle is not None:
            lost = sorted(map(str, of_bundle - taken))
            reasons = [bundle.refusal, f"{', '.join(lost)} cannot be loaded" if lost else ""]
            self._use(len(taken), "; ".join(filter(None, reasons)) or None)
            if bundle.refusal:
                self._on_warning(f"bundle {self._folder}: {bundle.refusal}. Others are used.")
        taken |= self._take("compile cache", self._loading.keys() - of_bundle)
        return {key: self._loading[key].result() for key in sorted(taken, key=str)}

    def _take(self, source: str, keys: Set[GraphKey]) -> set[GraphKey]:
        """The graphs among these that could be loaded by all processes; waits for them."""
        errors = {key: error for key in keys if (error := self._loading[key].exception())}
        remedy = "" if self._requires_bundle else " It is compiled instead."
        for error in errors.values():
            self._on_warning(f"{source}: {error}.{remedy}")
        taken = self._on_all_processes(keys - errors.keys())
        if taken:
            self._on_note(f"{source}: {plural(len(taken), 'executable')} taken")
        return taken

    def state(self) -> DecodeState | None:
        """An empty decode state, made in the background; None if it was not made.

        It is made if its executable was stored and loads, and if one process runs the job.
        """
        return None if self._state is None else self._state.result()

    def _empty_state(self) -> DecodeState | None:
        try:
            executable = self._loading[EMPTY_STATE].result()
        except LoadError:
            return None
        return executable()

    def keep(self, key: GraphKey, executable: jax.stages.Compiled) -> None:
        """Store a newly compiled executable in the cache, for the next start."""
        if self._cache is not None:
            self._cache.keep(key, executable)

    def _open(
        self, folder: Path | None, plan: Plan, target: Target, files: ModelFiles
    ) -> Bundle | None:
        """The bundle; None unless all processes can use their bundles."""
        bundle, refusal = None, "its --plan is no bundle"
        if folder is not None:
            own = own_folder(folder, self._peers.rank, self._peers.size)
            try:
                bundle = Bundle.open(own, plan, target, files.spec.config, files.path)
                refusal = None
            except BundleUnusable as error:
                refusal = str(error)
        given, refusals = zip(
            *self._peers.gather([None if folder is None else str(folder), refusal]), strict=True
        )
        if not any(given):
            return None
        found = [
            f"process {rank}: {reason}" if self._peers.size > 1 else reason
            for rank, reason in enumerate(refusals)
            if reason
        ]
        if found:
            self._use(0, "; ".join(found))
        for reason in found:
            self._on_warning(f"bundle {next(filter(None, given))}: {reason}. {_NOT_USED}")
        return None if found else bundle

    def _on_all_processes(self, keys: Set[GraphKey]) -> set[GraphKey]:
        """The graphs that all processes have in common."""
        names = set.intersection(*map(set, self._peers.gather(sorted(map(str, keys)))))
        return {key for key in keys if str(key) in names}

    def _use(self, num_executables: int, reason: str | None) -> None:
        """Note how the bundle is used, and why not wholly."""
        self.bundle = BundleUse(num_executables, reason)
        if self._requires_bundle and reason is not None:
            raise BundleRequired(
                f"--require-bundle: expected a bundle of which every executable can be used, got "
                f"another: {reason}. Make one in a new folder with noria compile, or run without "
                f"the option, and the graphs are compiled."
            )
