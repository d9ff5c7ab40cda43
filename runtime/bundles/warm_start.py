"""Starts from stored executables, which load while the weights load.

Executables come from a bundle or from the user's cache. They load in threads and need the
processor, while weights wait for the disk, so together they take only the longer of the two times.
A note says why a bundle cannot be used. Executables that are missing or cannot be loaded are
compiled.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import jax

from ...compile.compiled_graphs import CompiledGraphs
from ...compile.graphs.steps import DecodeState
from ...compile.plan import Plan
from ...compile.targets import Target
from ..checkpoint import ModelFiles
from ..console import plural
from ..errors import BundleRequired, BundleUnusable
from ..pods.peers import ALONE, Peers
from .bundle import Bundle, own_folder
from .executable_cache import ExecutableCache
from .loading import LoadError, load_in_background

_NOT_USED = "The bundle is not used; make one in a new folder with noria compile."


class BundleUse(NamedTuple):
    """The executables that a start has from a bundle, and why it has not all of them."""

    executables: int
    reason: str | None


class WarmStart:
    """The stored executables of a plan, which begin to load when this object is constructed.

    All processes of a pod take the same executables, because the compiler of one process may wait
    for the compilers of the others.
    """

    def __init__(
        self,
        bundle: Path | None,
        cache: Path | None,
        plan: Plan,
        target: Target,
        files: ModelFiles,
        on_note: Callable[[str], None],
        peers: Peers = ALONE,
        *,
        on_warning: Callable[[str], None] | None = None,
        requires_bundle: bool = False,
    ):
        """Read the bundle if one is given and usable, else the cache.

        Args:
          bundle: The bundle's folder; None if the user gave none.
          cache: The cache's folder, into which nobody else can write; None if there is no cache.
          plan: The plan of the graphs.
          target: The devices of the executables.
          files: The model.
          on_note: Called with lines about the progress.
          peers: The processes of the job.
          on_warning: Called with the reasons why executables are not used; by default `on_note`.
          requires_bundle: Whether to refuse a start from anything else than the bundle.

        Raises:
          BundleRequired: The bundle is required, and one of its executables cannot be used.
        """
        self._on_note, self._peers = on_note, peers
        self._on_warning = on_warning or on_note
        self._requires_bundle = requires_bundle
        self.bundle: BundleUse | None = None
        """The use of the bundle; None if no process was given one."""
        self._loaded: dict[str, jax.stages.Compiled] | None = None
        config = files.spec.config
        self._cache: ExecutableCache | None = None
        if cache is not None:
            own = own_folder(cache, peers.rank, peers.size)
            self._cache = ExecutableCache(own, plan, target, config, self._on_warning)
        dumped = self._open(bundle, plan, target, files)
        self._source = "compile cache" if dumped is None else f"bundle {bundle}"
        self._reads_bundle = dumped is not None
        if dumped is None:
            dumped = self._cache.read() if self._cache else {}
        names = self._names_on_all_processes(set(dumped))
        self._loading = load_in_background({name: dumped[name] for name in names}, target)
        self._state: Future[DecodeState | None] | None = None
        # several processes must start the same programs in the same order, so not in a thread
        if CompiledGraphs.EMPTY_STATE in names and peers.size == 1:
            background = ThreadPoolExecutor(max_workers=1)
            self._state = background.submit(self._empty_state)
            background.shutdown(wait=False)
        if requires_bundle:
            self.executables()  # before the weights load

    def executables(self) -> dict[str, jax.stages.Compiled]:
        """The loaded executables, by the name of their graph; waits until all have loaded."""
        if self._loaded is None:
            self._loaded = self._load()
        return self._loaded

    def _load(self) -> dict[str, jax.stages.Compiled]:
        errors = {name: future.exception() for name, future in self._loading.items()}
        for error in errors.values():
            if error is not None:
                remedy = "" if self._requires_bundle else " It is compiled instead."
                self._on_warning(f"{self._source}: {error}.{remedy}")
        names = self._names_on_all_processes(
            {name for name, error in errors.items() if error is None}
        )
        if names:
            self._on_note(f"{self._source}: {plural(len(names), 'executable')} taken")
        if self._reads_bundle:
            lost = sorted(set(errors) - names)
            reason = f"{', '.join(lost)} cannot be loaded" if lost else None
            self._use(len(names), reason)
        return {name: self._loading[name].result() for name in sorted(names)}

    def state(self) -> DecodeState | None:
        """An empty decode state, made in the background; None if it was not made.

        It is made if its executable was stored and loads, and if one process runs the job.
        """
        return None if self._state is None else self._state.result()

    def _empty_state(self) -> DecodeState | None:
        try:
            executable = self._loading[CompiledGraphs.EMPTY_STATE].result()
        except LoadError:
            return None
        return executable()

    def keep(self, name: str, executable: jax.stages.Compiled) -> None:
        """Store a newly compiled executable in the cache, for the next start."""
        if self._cache is not None:
            self._cache.keep(name, executable)

    def _open(
        self, folder: Path | None, plan: Plan, target: Target, files: ModelFiles
    ) -> dict[str, bytes] | None:
        """The bytes of a bundle's executables; None unless all processes can use their bundles."""
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
        return None if bundle is None or found else dict(bundle.dumped)

    def _names_on_all_processes(self, names: set[str]) -> set[str]:
        """The names that all processes have in common."""
        return set.intersection(*map(set, self._peers.gather(sorted(names))))

    def _use(self, num_executables: int, reason: str | None) -> None:
        """Note how the bundle is used, and why not wholly."""
        self.bundle = BundleUse(num_executables, reason)
        if self._requires_bundle and reason is not None:
            raise BundleRequired(
                f"--require-bundle: expected a bundle of which every executable can be used, got "
                f"another: {reason}. Make one in a new folder with noria compile, or run without "
                f"the option, and the graphs are compiled."
            )
