"""The table of graph kinds: everything that planning, build, calls and errors know of a graph.

A new kind of graph needs its body and one entry of `GRAPH_KINDS`. The functions of an entry get the
grid and the shape of a graph: a bucket, or None. Knows nothing of devices or files.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import TYPE_CHECKING, Any

from ...modelzoo.operations import Operations
from ...sharding.call import Call
from ..grids.bucket_grid import BucketGrid
from ..grids.prefill_bucket import PrefillBucket
from . import signatures
from .embed_step import embed_step
from .prefill_steps import fork_step, prefill_step, score_step
from .steps import decode_step

if TYPE_CHECKING:
    from ..abstract_model import AbstractModel
    from ..attention_kernels import AttentionChoices, Choice
    from ..grids.row_shape import RowShape


@dataclass(frozen=True)
class GraphKey:
    """One graph of a grid. Its text is its name in files and messages, and is never parsed."""

    kind: str
    """The name of the kind, a key of `GRAPH_KINDS`."""
    shape: PrefillBucket | None = None
    """The bucket of the graph; None for a kind of which a grid has one graph."""

    def __str__(self) -> str:
        """The name: `prefill 256x4`, `decode`, `fork`."""
        return self.kind if self.shape is None else f"{self.kind} {self.shape}"


DECODE = GraphKey("decode")
FORK = GraphKey("fork")
EMPTY_STATE = GraphKey("empty state")


def _runs_in(grid: BucketGrid, bucket: PrefillBucket, row: "RowShape", *, is_scored: bool) -> bool:
    """Whether a piece of the row's prompt runs in a bucket."""
    return row.is_scored == is_scored and bucket in grid.buckets_of(row.prompt_length)


def _change_bucket(grid: BucketGrid, bucket: PrefillBucket) -> str:
    """The changes that make the graphs of a bucket smaller, or remove them."""
    entries = grid.to_table()["prefill"]
    fewer = [
        [length, *(max(1, batch // 2) if length == bucket.length else batch for batch in batches)]
        for length, *batches in entries
    ]
    others = [entry for entry in entries if entry[0] != bucket.length]
    ways = [f"give it fewer rows with --set 'buckets.prefill={fewer}'"] if fewer != entries else []
    if not grid.chunks and bucket != grid.prefill[-1]:
        ways.append(f"leave it to the next longer one with --set 'buckets.prefill={others}'")
    ways = ways or ["spread the model over more devices, or take shorter rows"]
    return f"Change the bucket {bucket}: {', or '.join(ways)}."


def _change_slots(grid: BucketGrid, _: object) -> str:
    """The changes that make graphs of slots smaller."""
    slots, fewer = grid.decode_slots, max(1, grid.decode_slots // 2)
    return (
        f"Change buckets.decode_slots ({slots}) or buckets.pages ({grid.pages}), as with --set "
        f"buckets.decode_slots={fewer}, or spread the model over more devices."
    )


@dataclass(frozen=True)
class GraphKind:
    """One kind of graph.

    A graph takes the parameters if it runs the model, the state if it reads or writes it, and then
    its own arguments. It returns its output, which may be None, or a new state and its
    output if it takes a state.
    """

    per: type
    """The type of its shapes: `PrefillBucket`, or `NoneType` for one graph."""
    is_built: Callable[[BucketGrid], bool]
    """Whether a grid has graphs of this kind, one for each shape."""
    reads: tuple[str, ...]
    """The keys of a plan that its programs depend on besides their shapes. A table stands for all
    of its keys. A stored executable is used again if the values of these keys are the same."""
    body: Callable[[BucketGrid, Any, Operations], Callable[..., Any]] | None = None
    """The function that is compiled, with its static arguments. The operations are those of decode,
    which define how slots are sharded. None for the graph that makes the empty state."""
    arguments: Callable[["AbstractModel", BucketGrid, Any], Sequence[Any]] = lambda *_: ()
    """Its own abstract arguments."""
    takes_state: bool = False
    """Whether it takes the decode state, and returns a new one."""
    call: Callable[[BucketGrid, Any], Call] | None = None
    """The shape of a call, from which phase and costs follow. None for a graph that does not run
    the model."""
    kernel: Callable[["AttentionChoices", Any], "Choice | None"] = lambda *_: None
    """The attention kernel, for a graph that runs the model."""
    options: str | None = None
    """The name of its compiler options: `decode` for the table `[compiler.decode]`. None for a
    graph without options."""
    advice: Callable[[BucketGrid, Any], str] = _change_slots
    """The change to the plan that removes a failed graph, or makes it smaller."""
    serves: Callable[[BucketGrid, Any, "RowShape"], bool] = lambda *_: True
    """Whether a row that fits the grid needs the graph."""


_PROGRAM = ("target", "model.scan_layers", "numbers.dtype", "numbers.cache", "mesh", "rules")
_STATE = (
    *_PROGRAM,
    "decode.rules",
    "buckets.max_length",
    "buckets.chunk",
    "buckets.decode_slots",
    "buckets.pages",
    "buckets.page",
    "buckets.row_tokens",
)
_MODEL = ("numbers", "adapters")
_PREFILL = (*_MODEL, "prefill.rules", "attention.prefill", "experts.prefill")


def _prefill_kind(body: Callable[..., Any], *, is_scored: bool, **entries: Any) -> GraphKind:
    """A kind of graph that writes prompts into slots, with or without scores."""
    arguments = signatures.score_arguments if is_scored else signatures.prefill_arguments
    options = "score" if is_scored else "prefill"
    return GraphKind(
        per=PrefillBucket,
        reads=(*_STATE, *_PREFILL, f"compiler.{options}"),
        body=lambda grid, bucket, operations: partial(body, cache_operations=operations),
        arguments=arguments,
        takes_state=True,
        call=lambda grid, bucket: grid.prefill_call(bucket, is_scored=is_scored),
        kernel=lambda kernels, bucket: kernels.prefill[bucket.tokens],
        options=options,
        advice=_change_bucket,
        serves=partial(_runs_in, is_scored=is_scored),
        **entries,
    )


GRAPH_KINDS: Mapping[str, GraphKind] = {
    "prefill": _prefill_kind(
        prefill_step,
        is_scored=False,
        is_built=lambda grid: grid.decode_slots > 0,
    ),
    "score": _prefill_kind(score_step, is_scored=True, is_built=lambda grid: grid.score),
    "embed": GraphKind(
        per=PrefillBucket,
        is_built=lambda grid: grid.embed,
        reads=(*_PROGRAM, *_PREFILL, "compiler.embed"),
        body=lambda *_: embed_step,
        arguments=lambda model, grid, bucket: signatures.embed_arguments(bucket),
        call=BucketGrid.prefill_call,
        kernel=lambda kernels, bucket: kernels.prefill[bucket.tokens],
        options="embed",
        advice=_change_bucket,
        serves=partial(_runs_in, is_scored=False),
    ),
    DECODE.kind: GraphKind(
        per=NoneType,
        is_built=lambda grid: grid.decode_slots > 0,
        reads=(
            *_STATE,
            *_MODEL,
            "attention.decode",
            "experts.decode",
            "buckets.steps_per_call",
            "prefixes.groups",
            "prefixes.rows",
            "prefixes.length",
            "structured",
            "compiler.decode",
        ),
        body=lambda grid, *_: partial(decode_step, num_steps=grid.steps_per_call),
        arguments=lambda model, grid, _: signatures.decode_arguments(model, grid),
        takes_state=True,
        call=lambda grid, _: grid.decode_call(),
        kernel=lambda kernels, _: kernels.decode,
        options="decode",
        serves=lambda grid, _, row: row.max_tokens != 0,
    ),
    FORK.kind: GraphKind(
        per=NoneType,
        is_built=lambda grid: grid.decode_slots > 0,
        reads=(*_STATE, "compiler.fork"),
        body=lambda grid, _, operations: partial(fork_step, cache_operations=operations),
        arguments=lambda model, grid, _: signatures.fork_arguments(model, grid),
        takes_state=True,
        options="fork",
        serves=lambda grid, _, row: row.num_sequences > 1,
    ),
    EMPTY_STATE.kind: GraphKind(per=NoneType, is_built=lambda grid: not grid.embed, reads=_STATE),
}
"""The kinds by name."""


def kinds_of(grid: BucketGrid, per: type) -> list[str]:
    """The kinds of which a grid has a graph for each shape of a type."""
    return [name for name, kind in GRAPH_KINDS.items() if kind.per is per and kind.is_built(grid)]


def graph_keys(grid: BucketGrid) -> list[GraphKey]:
    """The graphs of a grid: that of decode first, then those of the longest prompts."""
    shapes = (None, *reversed(grid.prefill))
    return [GraphKey(name, shape) for shape in shapes for name in kinds_of(grid, type(shape))]


def call_of(grid: BucketGrid, key: GraphKey) -> Call:
    """The shape of a call of a graph that runs the model; for decode, of one step."""
    call = GRAPH_KINDS[key.kind].call
    assert call is not None, key
    return call(grid, key.shape)


def read_values(plan: Mapping[str, Any], key: GraphKey) -> str:
    """The values in a plan's table of all keys that a graph's program depends on, as JSON."""
    values: list[Any] = [table.NAME in plan for table in BucketGrid.TABLES]
    for path in GRAPH_KINDS[key.kind].reads:
        value: Any = plan
        for name in path.split("."):
            value = (value or {}).get(name)
        values.append(value)
    # not sorted: the axes of a mesh and the rules of weights have an order
    return json.dumps([str(key), *values])
