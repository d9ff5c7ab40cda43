"""A start with executables that are there already, which load while the rest is made ready.

They come from a bundle, or from the user's cache. Executables load in threads of the compiler's
runtime, and weights wait for the disk: in parallel they take as long as the longer one. A note says
why a bundle cannot be used. What cannot be taken is compiled.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax

from ...compile.compiled_graphs import CompiledGraphs
from ...compile.plan import Plan
from ...compile.steps import DecodeState
from ...compile.targets import Target
from ..checkpoint import ModelFiles
from ..errors import BundleUnusable
from ..pods.peers import ALONE, Peers
from .bundle import Bundle, own_folder
from .kept_programs import KeptPrograms
from .loading import NotLoaded, load_in_background

_NOT_USED = "The bundle is not used; make one in a new folder with noria compile."


class WarmStart:
    """Executables that are ready for a plan. They begin to load when this object is made.

    Processes of a pod take the same executables: the compiler of one may wait for those of the
    others.
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
    ):
        """Look into the bundle, if one was given, then into the folder of the cache.

        Args:
          bundle: The folder that the user gave.
          cache: A folder that nobody else can write into; None where nothing is kept.
          plan: The plan of all graphs.
          target: The devices that they run on.
          files: The model.
          on_note: Called with lines for the user.
          peers: The processes of the job.
        """
        self._on_note, self._peers = on_note, peers
        config = files.spec.config
        self._kept: KeptPrograms | None = None
        if cache is not None:
            own = own_folder(cache, peers.rank, peers.size)
            self._kept = KeptPrograms(own, plan, target, config, on_note)
        dumped: dict[str, bytes] | None = None
        if bundle is not None:
            dumped = self._open(bundle, plan, target, files)
        self._source = "compile cache" if dumped is None else f"bundle {bundle}"
        if dumped is None:
            dumped = self._kept.read() if self._kept else {}
        names = self._of_all(set(dumped))
        self._loading = load_in_background({name: dumped[name] for name in names}, target)
        self._state: Future[DecodeState | None] | None = None
        # the devices of several processes must be given the same programs in the same order
        if CompiledGraphs.EMPTY_STATE in names and peers.size == 1:
            background = ThreadPoolExecutor(max_workers=1)
            self._state = background.submit(self._empty_state)
            background.shutdown(wait=False)

    def executables(self) -> dict[str, jax.stages.Compiled]:
        """The executables that are loaded, by the name of their graph; waits for them."""
        errors = {name: one.exception() for name, one in self._loading.items()}
        for error in errors.values():
            if error is not None:
                self._say(f"{error}. Compiling it instead.")
        names = self._of_all({name for name, error in errors.items() if error is None})
        if names:
            self._say(f"{len(names)} executables taken")
        return {name: self._loading[name].result() for name in sorted(names)}

    def state(self) -> DecodeState | None:
        """An empty decode state that was made in the background, if its executable was ready."""
        return None if self._state is None else self._state.result()

    def _empty_state(self) -> DecodeState | None:
        try:
            executable = self._loading[CompiledGraphs.EMPTY_STATE].result()
        except NotLoaded:
            return None
        return executable()

    def keep(self, name: str, executable: jax.stages.Compiled) -> None:
        """Keep an executable that was compiled, for the next start."""
        if self._kept is not None:
            self._kept.keep(name, executable)

    def _open(
        self, folder: Path, plan: Plan, target: Target, files: ModelFiles
    ) -> dict[str, bytes] | None:
        """The bytes of a bundle's executables; None where not all processes can use theirs."""
        own = own_folder(folder, self._peers.rank, self._peers.size)
        try:
            bundle, refusal = Bundle.open(own, plan, target, files.spec.config, files.path), None
        except BundleUnusable as error:
            bundle, refusal = None, str(error)
        refusals = self._peers.gather(refusal)
        for rank, reason in enumerate(refusals):
            if reason:
                who = f"process {rank}: " if self._peers.size > 1 else ""
                self._on_note(f"bundle {folder}: {who}{reason}. {_NOT_USED}")
        return None if bundle is None or any(refusals) else dict(bundle.dumped)

    def _of_all(self, names: set[str]) -> set[str]:
        """The names that all processes have."""
        return set.intersection(*map(set, self._peers.gather(sorted(names))))

    def _say(self, what: str) -> None:
        self._on_note(f"{self._source}: {what}")
