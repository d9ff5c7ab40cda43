"""A start from a bundle: executables load in the background while the rest is made ready.

Executables load in a thread of the compiler's runtime, and weights wait for the disk: in parallel
they take as long as the longer one. A note says why a bundle cannot be used; then the caller
compiles the plan. Guarantees: executables are given out only when all of them are loaded, so
nothing is left to compile when rows run.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from ...compile.compiled_graphs import CompiledGraphs
from ...compile.plan import Plan
from ...compile.steps import DecodeState
from ...compile.targets import Target
from ..batch.peers import ALONE, Peers
from ..checkpoint import ModelFiles
from .bundle import Bundle, own_folder
from .own_files import BundleUnusable

_COMPILING = "Compiling the plan instead; make a bundle in a new folder with noria compile."


class WarmStart:
    """What a folder has ready for a plan. Begins to load executables when it is made.

    Processes of a pod take executables all together or not at all: the compiler of one may wait for
    those of the others.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        target: Target,
        files: ModelFiles,
        on_note: Callable[[str], None],
        peers: Peers = ALONE,
    ):
        self._folder, self._on_note, self._peers = folder, on_note, peers
        own = own_folder(folder, peers.rank, peers.size)
        self._bundle: Bundle | None = None
        try:
            bundle, refusal = Bundle.open(own, plan, target, files.spec.config, files.path), None
        except BundleUnusable as error:
            bundle, refusal = None, error
        is_taken = self._all_take(refusal)
        if bundle is None or not is_taken:
            return
        self._bundle, self._loading = bundle, bundle.load()
        self._state: Future[DecodeState] | None = None
        # the devices of several processes must be given the same programs in the same order
        if peers.size == 1:
            background = ThreadPoolExecutor(max_workers=1)
            self._state = background.submit(self._empty_state)
            background.shutdown(wait=False)

    def graphs(self) -> tuple[CompiledGraphs, DecodeState] | None:
        """The executables, loaded, and an empty state; None where not all of them can be loaded."""
        if self._bundle is None or not self._all_take(self._load_error()):
            return None
        loaded = {name: loading.result() for name, loading in self._loading.items()}
        self._say(f"{len(loaded)} executables taken, none compiled")
        graphs = CompiledGraphs(self._bundle.plan.buckets, loaded)
        return graphs, graphs.empty_state() if self._state is None else self._state.result()

    def _empty_state(self) -> DecodeState:
        return self._loading[CompiledGraphs.EMPTY_STATE].result()()

    def _load_error(self) -> BundleUnusable | None:
        """Why one of the executables cannot be loaded; waits for all of them."""
        errors = (loading.exception() for loading in self._loading.values())
        return next((error for error in errors if isinstance(error, BundleUnusable)), None)

    def _all_take(self, refusal: BundleUnusable | None) -> bool:
        """Whether no process refuses; why one does is said."""
        refusals = self._peers.gather(refusal and str(refusal))
        for rank, reason in enumerate(refusals):
            if reason:
                who = f"process {rank}: " if self._peers.size > 1 else ""
                self._say(f"{who}{reason}. {_COMPILING}")
        return not any(refusals)

    def _say(self, what: str) -> None:
        self._on_note(f"bundle {self._folder}: {what}")
