"""A start from a bundle: executables load in the background while the rest is made ready.

Loading executables takes a thread of the compiler's runtime and no interpreter, reading weights the
disk and hashes: side by side they take as long as the longer one. The first rows wait for the
executables that they run through, and for no others. What cannot be used is said in
a note, and left to the caller to make. Knows nothing of how that is done.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import jax

from ...compile.compiled_graphs import CompiledGraphs
from ...compile.monitor import compile_monitor
from ...compile.plan import Plan
from ...compile.steps import DecodeState
from ...compile.targets import Target
from ..batch.peers import ALONE, Peers
from ..checkpoint import ModelFiles
from .bundle import Bundle, own_folder
from .own_files import BundleUnusable

_COMPILING = "Compiling the plan instead."


def begin(
    path: Path | None,
    plan: Plan,
    target: Target,
    files: ModelFiles,
    on_note: Callable[[str], None],
    peers: Peers = ALONE,
) -> "WarmStart | None":
    """A start from the bundle that a plan was read from; None where it was a file, or none."""
    if path is None or not path.is_dir():
        return None
    return WarmStart(path, plan, target, files, on_note, peers)


class WarmStart:
    """What a folder has ready for a plan. Begins to load executables when it is made.

    Processes of a pod take executables all together or not at all, and weights likewise: the
    compiler of one, or its reader, may wait for those of the others.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        target: Target,
        files: ModelFiles,
        on_note: Callable[[str], None],
        peers: Peers,
    ):
        self._folder, self._files, self._on_note, self._peers = folder, files, on_note, peers
        own = own_folder(folder, peers.rank, peers.size)
        self._bundle: Bundle | None = None
        try:
            bundle, refusal = Bundle.open(own, plan, target, files.spec.config, files.path), None
        except BundleUnusable as error:
            bundle, refusal = None, error
        is_taken = self._all_take(refusal, _COMPILING)
        if bundle is None or not is_taken:
            return
        self._bundle, self._loading = bundle, bundle.load()
        self._state: Future[DecodeState] | None = None
        # the devices of several processes must be given the same programs in the same order
        if peers.size == 1:
            background = ThreadPoolExecutor(max_workers=1)
            self._state = background.submit(self._empty_state)
            background.shutdown(wait=False)

    def graphs(
        self, compile_graph: Callable[[str], jax.stages.Compiled]
    ) -> tuple[CompiledGraphs, DecodeState] | None:
        """The executables, which load on, and an empty state; None where there are none.

        One that turns out not to load is compiled, when it is first called.
        """
        if self._bundle is None:
            return None
        if self._peers.size > 1 and not self._all_take(self._load_error(), _COMPILING):
            return None
        self._say(f"{len(self._loading)} executables taken, none compiled")
        loaded = _LoadedOrCompiled(self._loading, compile_graph, self._say)
        graphs = CompiledGraphs(self._bundle.plan.buckets, loaded)
        with suppress(BundleUnusable):
            if self._state is not None:
                return graphs, self._state.result()
        return graphs, graphs.empty_state()

    def parameters(
        self,
        abstract: Mapping[str, jax.ShapeDtypeStruct],
        shardings: Mapping[str, jax.sharding.Sharding],
    ) -> dict[str, jax.Array] | None:
        """The weights in place; None where not every process has some that it can use."""
        if self._bundle is None or not all(self._peers.gather(self._bundle.has_weights)):
            return None
        found, refusal = None, None
        try:
            found = self._bundle.parameters(self._files.fingerprint(), abstract, shardings)
        except BundleUnusable as error:
            refusal = BundleUnusable(f"weights: {error}")
        # reading the model's own may be a program of all processes
        is_taken = self._all_take(refusal, f"Reading those of {self._files.name} instead.")
        return found if is_taken else None

    def _empty_state(self) -> DecodeState:
        return self._loading[CompiledGraphs.EMPTY_STATE].result()()

    def _load_error(self) -> BundleUnusable | None:
        """Why one of the executables cannot be loaded; waits for all of them."""
        errors = (loading.exception() for loading in self._loading.values())
        return next((error for error in errors if isinstance(error, BundleUnusable)), None)

    def _all_take(self, refusal: BundleUnusable | None, instead: str) -> bool:
        """Whether no process refuses; why one does is said."""
        refusals = self._peers.gather(refusal and str(refusal))
        for rank, reason in enumerate(refusals):
            if reason:
                who = f"process {rank}: " if self._peers.size > 1 else ""
                self._say(f"{who}{reason}. {instead}")
        return not any(refusals)

    def _say(self, what: str) -> None:
        self._on_note(f"bundle {self._folder}: {what}")


class _LoadedOrCompiled(Mapping[str, jax.stages.Compiled]):
    """Executables by name; one that cannot be loaded is compiled instead, with a word."""

    def __init__(
        self,
        loading: Mapping[str, Future[jax.stages.Compiled]],
        compile_graph: Callable[[str], jax.stages.Compiled],
        say: Callable[[str], None],
    ):
        self._loading, self._compile_graph, self._say = loading, compile_graph, say
        self._ready: dict[str, jax.stages.Compiled] = {}

    def __getitem__(self, name: str) -> jax.stages.Compiled:
        if name not in self._ready:
            self._ready[name] = self._loaded(name)
        return self._ready[name]

    def _loaded(self, name: str) -> jax.stages.Compiled:
        try:
            return self._loading[name].result()
        except BundleUnusable as error:
            self._say(f"{error}. Compiling it instead; compile the bundle again.")
            with compile_monitor().announced():
                return self._compile_graph(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._loading)

    def __len__(self) -> int:
        return len(self._loading)
