"""A start from a bundle: executables load in the background while the rest is made ready.

Loading executables takes a thread of the compiler's runtime and no interpreter, reading weights the
disk and hashes: side by side they take as long as the longer one. The first rows wait for the
executables that they run through, and for no others. What cannot be used is said in
a note, and left to the caller to make. Knows nothing of how that is done.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax

from ...compile.compiled_graphs import CompiledGraphs
from ...compile.plan import Plan
from ...compile.steps import DecodeState
from ...compile.targets import Target
from ..checkpoint import ModelFiles
from .bundle import Bundle
from .own_files import BundleUnusable


def begin(
    path: Path | None,
    plan: Plan,
    target: Target,
    files: ModelFiles,
    on_note: Callable[[str], None],
) -> "WarmStart | None":
    """A start from the bundle that a plan was read from; None where it was a file, or none."""
    if path is None or not path.is_dir():
        return None
    return WarmStart(path, plan, target, files, on_note)


class WarmStart:
    """What a folder has ready for a plan. Begins to load executables when it is made."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        target: Target,
        files: ModelFiles,
        on_note: Callable[[str], None],
    ):
        self._folder, self._files, self._on_note = folder, files, on_note
        self._bundle: Bundle | None = None
        try:
            self._bundle = Bundle.open(folder, plan, target, files.spec.config, files.path)
        except BundleUnusable as error:
            self._say(f"{error}. Compiling the plan instead.")
            return
        self._loading = self._bundle.load()
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
        self._say(f"{len(self._loading)} executables taken, none compiled")
        loaded = _LoadedOrCompiled(self._loading, compile_graph, self._say)
        graphs = CompiledGraphs(self._bundle.plan.buckets, loaded)
        try:
            return graphs, self._state.result()
        except BundleUnusable:
            return graphs, graphs.empty_state()

    def _empty_state(self) -> DecodeState:
        return self._loading[CompiledGraphs.EMPTY_STATE].result()()

    def parameters(
        self,
        abstract: Mapping[str, jax.ShapeDtypeStruct],
        shardings: Mapping[str, jax.sharding.Sharding],
    ) -> dict[str, jax.Array] | None:
        """The weights in place; None where there are none, or none that can be used."""
        if self._bundle is None or not self._bundle.has_weights:
            return None
        try:
            return self._bundle.parameters(self._files.fingerprint(), abstract, shardings)
        except BundleUnusable as error:
            self._say(f"weights: {error}. Reading those of {self._files.name} instead.")
            return None

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
            return self._compile_graph(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._loading)

    def __len__(self) -> int:
        return len(self._loading)
