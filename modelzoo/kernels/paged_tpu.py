"""A kernel of decode for TPU that reads the live pages of a pool, and no others.

The rows of a batch are processed one after another. A row walks its own pages in order, from the
first page in which its queries see an entry to the page of its last entry. Each turn of the walk
reads a few pages of all heads, while those of the turn before are used. The first turn of a row is
read during the last turn of the row before. Scores and weights never leave the chip.

Knows nothing of layers, pools or meshes. Guarantees: equals `attend_in_groups` up to the order of
sums, `lse` included; the bits of a row depend on its queries, positions and entries alone, not on
the numbers of its pages, its place in the batch or the rows beside it; entries after the last
position of a row may hold anything. Sources: Kwon et al. 2023, "Efficient Memory Management for
Large Language Model Serving with PagedAttention" (2309.06180); Dao 2023, "FlashAttention-2"
(2307.08691), section 3.1, for the single division of results at the end.
"""

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..attention.attend import first_visible, soft_cap
from ..attention.paged import PagedRows
from ..axes import LANES
from ..cache.entry_codes import EntryCodes
from ..cache.segments import EMPTY_POSITION
from ..cache.state_spec import Entries
from ..layer_config import PLAIN_SCORES, Scores, Window
from .call import AttentionCall

MAX_QUERIES = 8
"""The maximum queries of a row."""
MAX_TABLE = 2**17
"""The maximum number of pages in the table of a call: half of the 1 MiB of scalar memory."""
TURN_ENTRIES, TURN_BYTES = 256, 2**20
"""The maximum entries of a turn of several pages, and the maximum bytes of their keys and values.
"""
SUBLANES = 8
VMEM_BYTES = 64 * 2**20
"""The limit of on-chip memory for the kernel."""
_MASKED_SCORE = -1e30


class Walk(NamedTuple):
    """Scalars that tell which pages each row reads."""

    page: Any
    """The table of pages, row by row."""
    first: Any
    """For each row, the index of its first page in its part of the table."""
    end: Any
    """For each row, the index after its last page; no more than `first` if it sees nothing."""
    later: Any
    """For each row, the next row that sees something; the number of rows if there is none."""
    earliest: Any
    """The first position that each query sees, row by row."""
    latest: Any
    """The last position that each query sees, row by row; -1 for a query without a token."""


class Pages(NamedTuple):
    """Arrays of keys and values, in the pool or on the chip; keys alone if values are the same."""

    entries: list[Any]
    scales: list[Any]
    """The scales of entries in codes; empty without codes."""

    @classmethod
    def of(cls, k_PKSH: Entries, v_PKSH: Entries) -> "Pages":
        """The arrays of the pool."""
        if not isinstance(k_PKSH, EntryCodes):
            return cls([k_PKSH] if k_PKSH is v_PKSH else [k_PKSH, v_PKSH], [])
        assert isinstance(v_PKSH, EntryCodes), "values are in codes if keys are"
        both = [k_PKSH] if k_PKSH.codes is v_PKSH.codes else [k_PKSH, v_PKSH]
        # heads and parts are one axis: XLA would pad an axis of one part to the rows of a tile
        scales = [x.scale_BKPS.reshape(len(x.codes), -1, x.codes.shape[2]) for x in both]
        return cls([x.codes for x in both], scales)


class Form(NamedTuple):
    """Static facts of a call."""

    num_pages: int
    """Entries of the table for a row."""
    num_tokens: int
    num_heads: int
    """Query heads of a group."""
    num_parts: int
    """Parts of the features with a scale of their own."""
    page: int
    turn: int
    """Pages of a turn."""
    cap: float | None


class Buffers(NamedTuple):
    """On-chip memory: two turns of each array, and the running result of a row."""

    pages: Pages
    semaphores: Any
    turns: Any
    """The number of turns so far; every second turn uses the second buffer."""
    max_KA1: Any
    sum_KA1: Any
    sum_KAH: Any


def paged_tpu_refusal(call: AttentionCall) -> str | None:
    """The reason why the kernel cannot serve a call, or None if it can."""
    if call.page is None:
        return "it takes a cache in pages (buckets.page)"
    if call.num_queries > MAX_QUERIES:
        return f"it takes at most {MAX_QUERIES} queries a row, got {call.num_queries}"
    if call.sees_later:
        return "it takes no windows in both directions"
    if call.dtype == jnp.float16:
        return "it takes bfloat16 and float32, got float16"
    if call.key_dim % LANES or call.value_dim % LANES:
        return (
            f"it takes cached heads of a multiple of {LANES} features, got {call.key_dim} for keys "
            f"and {call.value_dim} for values"
        )
    if call.table > MAX_TABLE:
        return (
            f"it takes a table of at most {MAX_TABLE} pages, half of the scalar memory, got "
            f"{call.table}: larger pages (buckets.page), fewer slots (buckets.decode_slots) or a "
            f"lower buckets.max_length make it smaller"
        )
    if call.has_codes:
        return _codes_refusal(call, call.page)
    least = SUBLANES * 4 // call.dtype.itemsize
    if call.page % least:
        return f"it takes pages of {least} entries or more, got {call.page} (buckets.page)"
    return None


def _codes_refusal(call: AttentionCall, page: int) -> str | None:
    """The reason why the kernel cannot serve a cache in codes, or None if it can.

    In other forms, XLA keeps codes or scales in another memory layout where tokens are written, and
    would copy all of them for the kernel.
    """
    if call.has_rotated_codes:
        return "it takes codes in int8 or float8_e4m3fn only (numbers.cache)"
    if {call.key_dim, call.value_dim} != {LANES}:
        return f"it takes codes of heads of {LANES} features, got {call.key_dim} (numbers.cache)"
    if page % LANES:
        return f"it takes codes in pages of {LANES} entries, got {page} (buckets.page)"
    return None


def attend_pages_tpu(
    q_BTKGH: jax.Array,
    k_PKSH: Entries,
    v_PKSH: Entries,
    rows: PagedRows,
    window: Window = None,
    scores: Scores = PLAIN_SCORES,
) -> tuple[jax.Array, jax.Array]:
    """Attend as `attend_in_groups` does; see `AttendPages`.

    Queries may have fewer features than the cache, whose heads may be padded with zeros.
    """
    B, T, K, G, H = q_BTKGH.shape
    splits = k_PKSH.splits if isinstance(k_PKSH, EntryCodes) else ()
    page, num_pages = k_PKSH.shape[2], rows.page_BN.shape[1]
    pages = Pages.of(k_PKSH, v_PKSH)
    turn = min(num_pages, _pages_of_turn(pages, page))
    form = Form(num_pages, T, G, len(splits) + 1, page, turn, scores.cap)

    scale = H**-0.5 if scores.scale is None else scores.scale
    q_BKTGH = (q_BTKGH * scale).astype(q_BTKGH.dtype).transpose(0, 2, 1, 3, 4)
    padding = (0, 0), (0, 0), (0, -(T * G) % SUBLANES), (0, k_PKSH.shape[-1] - H)
    q_BKAH = _queries_of_parts(jnp.pad(q_BKTGH.reshape(B, K, T * G, H), padding), splits)
    out_BKAH, lse_B1A = _call(q_BKAH, pages, _walk(rows, T, window, page), form)
    out_BKTGH = out_BKAH[:, :, : T * G].reshape(B, K, T, G, -1)
    lse_BKTG = lse_B1A.reshape(B, K, -1)[:, :, : T * G].reshape(B, K, T, G)
    return out_BKTGH.transpose(0, 2, 1, 3, 4), lse_BKTG.transpose(0, 2, 1, 3)


def _pages_of_turn(pages: Pages, page: int) -> int:
    """The pages of a turn. Scales of several pages would lie side by side, in whole lanes."""
    if pages.scales and page % LANES:
        return 1
    entry = sum(x.size // x.shape[0] // page * x.dtype.itemsize for x in pages.entries)
    return max(1, min(TURN_ENTRIES, TURN_BYTES // entry) // page)


def _queries_of_parts(q_BKAH: jax.Array, splits: tuple[int, ...]) -> jax.Array:
    """Queries once for each part of the features, with zeros for the other parts."""
    B, K, _, H = q_BKAH.shape
    part_H = np.searchsorted(splits, np.arange(H), side="right")
    is_part_PH = np.arange(len(splits) + 1)[:, None] == part_H
    return jnp.where(is_part_PH[None, None, :, None], q_BKAH[:, :, None], 0).reshape(B, K, -1, H)


def _walk(rows: PagedRows, num_tokens: int, window: Window, page: int) -> Walk:
    """The pages that each row reads, and what its queries see."""
    latest_BT = rows.position_BT(num_tokens)
    is_token_BT = latest_BT > EMPTY_POSITION
    earliest_BT = jnp.zeros_like(latest_BT)
    if window is not None:
        earliest_BT = jnp.maximum(first_visible(latest_BT, window), 0)
    end_B = latest_BT.max(axis=1) // page + 1
    first_B = jnp.where(is_token_BT, earliest_BT, page * rows.page_BN.shape[1]).min(axis=1) // page
    B = len(end_B)
    row_B = jnp.where(end_B > first_B, jnp.arange(B), B)
    later_B = jax.lax.cummin(jnp.append(row_B[1:], B), reverse=True)
    scalars = rows.page_BN, first_B, end_B, later_B, earliest_BT, latest_BT
    return Walk(*(x.ravel().astype(jnp.int32) for x in scalars))


def _call(q_BKAH: jax.Array, pages: Pages, walk: Walk, form: Form) -> tuple[jax.Array, jax.Array]:
    """Call the kernel with queries whose tokens and heads are the rows of a product."""
    # imported late: only starts with this kernel spend the tenth of a second that Pallas takes
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    B, K, all_A, _ = q_BKAH.shape
    A, value_dim = all_A // form.num_parts, pages.entries[-1].shape[-1]
    results = (
        jax.ShapeDtypeStruct((B, K, A, value_dim), q_BKAH.dtype),
        jax.ShapeDtypeStruct((B, 1, K * A), jnp.float32),
    )
    size = form.turn * form.page
    scratch = Buffers(
        Pages(
            [pltpu.VMEM((2, K, size, x.shape[-1]), x.dtype) for x in pages.entries],
            [pltpu.VMEM((2, x.shape[1], size), x.dtype) for x in pages.scales],
        ),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((1,), jnp.int32),
        *(pltpu.VMEM((K, A, size), jnp.float32) for size in (1, 1, value_dim)),
    )
    return pl.pallas_call(
        partial(_attend_row, form),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B,),
            in_specs=[_row_block(q_BKAH), _in_hbm(pages)],
            out_specs=tuple(map(_row_block, results)),
            scratch_shapes=[scratch],
        ),
        out_shape=results,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=_most_work(q_BKAH, pages, form, value_dim),
        name="paged",
    )(walk, q_BKAH, pages)


def _most_work(q_BKAH: jax.Array, pages: Pages, form: Form, value_dim: int) -> Any:
    """The work of a call whose rows have all pages that they may have, each page in one row."""
    from jax.experimental import pallas as pl

    B, K, A, key_dim = q_BKAH.shape
    pool = pages.entries[0].shape[0]
    num_pages = min(pool, B * form.num_pages)
    results = B * K * A * (value_dim * q_BKAH.dtype.itemsize + 4)
    num_entries = num_pages * form.page
    return pl.CostEstimate(
        flops=2 * num_entries * K * A * (key_dim + value_dim),
        transcendentals=num_entries * K * A,
        bytes_accessed=sum(x.nbytes for x in jax.tree.leaves(pages)) // pool * num_pages
        + q_BKAH.nbytes
        + results,
    )


def _in_hbm(pages: Pages) -> Any:
    """The places of arrays that the kernel copies itself."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    return jax.tree.map(lambda _: pl.BlockSpec(memory_space=pltpu.HBM), pages)


def _row_block(x: Any) -> Any:
    """The block of an array that belongs to one row."""
    from jax.experimental import pallas as pl

    return pl.BlockSpec((None, *x.shape[1:]), lambda b, *_: (b, *(0,) * (len(x.shape) - 1)))


def _attend_row(
    form: Form, walk: Walk, q_KAH: Any, pages: Pages, out_KAH: Any, lse_1A: Any, own: Buffers
) -> None:
    """Attend from the queries of one row to its pages."""
    from jax.experimental import pallas as pl

    b, B = pl.program_id(0), pl.num_programs(0)
    num_turns = _num_turns(walk, form, b)
    reader = partial(_turn_copies, form, walk, pages, own)

    @pl.when(b == 0)
    def _() -> None:
        own.turns[0] = 0
        first = jnp.where(num_turns > 0, 0, walk.later[0])

        @pl.when(first < B)
        def _() -> None:
            reader((first, 0, 0), "start")

    before = own.turns[0]
    own.turns[0] = before + num_turns
    own.max_KA1[...] = jnp.full_like(own.max_KA1, _MASKED_SCORE)
    own.sum_KA1[...] = jnp.zeros_like(own.sum_KA1)
    own.sum_KAH[...] = jnp.zeros_like(own.sum_KAH)

    def take_turn(turn: jax.Array, _: None) -> None:
        buffer = jax.lax.rem(before + turn, 2)
        is_last = turn + 1 == num_turns
        next_row = jnp.where(is_last, walk.later[b], b)

        @pl.when(next_row < B)
        def _() -> None:
            reader((next_row, jnp.where(is_last, 0, turn + 1), 1 - buffer), "start")

        reader((b, turn, buffer), "wait")
        entry = (walk.first[b] + turn * form.turn) * form.page
        _add_turn(form, walk, q_KAH, own, (b, entry, buffer))

    jax.lax.fori_loop(0, num_turns, take_turn, None)
    is_empty_KA1 = own.max_KA1[...] < _MASKED_SCORE / 2
    out = jnp.where(is_empty_KA1, 0.0, own.sum_KAH[...] / own.sum_KA1[...])
    out_KAH[...] = out.astype(out_KAH.dtype)
    lse = jnp.where(is_empty_KA1, -jnp.inf, own.max_KA1[...] + jnp.log(own.sum_KA1[...]))
    # registers hold vectors along lanes: transpose the column to get a row
    lse_A1 = lse.reshape(-1, 1)
    lse_1A[...] = jnp.broadcast_to(lse_A1, (len(lse_A1), LANES)).T[:1]


def _num_turns(walk: Walk, form: Form, b: Any) -> Any:
    """The turns of a row."""
    num_pages = jnp.maximum(walk.end[b] - walk.first[b], 0)
    return jax.lax.div(num_pages + form.turn - 1, form.turn)


def _turn_copies(
    form: Form, walk: Walk, pages: Pages, own: Buffers, place: tuple[Any, Any, Any], act: str
) -> None:
    """Start the copies of a turn of a row to a buffer, or wait for them."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    b, turn, buffer = place
    for i in range(form.turn):
        index = walk.first[b] + turn * form.turn + i

        @pl.when(index < walk.end[b])
        def _(index: Any = index, i: int = i) -> None:
            page = walk.page[b * form.num_pages + index]
            own_S = pl.ds(i * form.page, form.page)
            for x, to in zip(pages.entries, own.pages.entries, strict=True):
                copy = pltpu.make_async_copy(
                    x.at[page], to.at[buffer, :, own_S], own.semaphores.at[buffer]
                )
                getattr(copy, act)()
            for x, to in zip(pages.scales, own.pages.scales, strict=True):
                copy = pltpu.make_async_copy(
                    x.at[page], to.at[buffer, :, own_S], own.semaphores.at[buffer]
                )
                getattr(copy, act)()


def _add_turn(
    form: Form, walk: Walk, q_KAH: Any, own: Buffers, place: tuple[Any, Any, Any]
) -> None:
    """Add the entries of a turn, which are in a buffer, to the running result of a row."""
    b, entry, buffer = place
    K, A, _ = own.sum_KAH.shape
    S = form.turn * form.page
    queries = [b * form.num_tokens + t for t in range(form.num_tokens)]
    earliest, latest = ([x[i] for i in queries] for x in (walk.earliest, walk.latest))
    last = reduce(jnp.maximum, latest)
    values = own.pages.entries[-1].at[buffer]
    is_entry_1S1 = entry + jax.lax.broadcasted_iota(jnp.int32, (1, S, 1), 1) <= last
    v_KSH = jnp.where(is_entry_1S1, values[...].astype(q_KAH.dtype), 0)
    k_KSH = own.pages.entries[0][buffer].astype(q_KAH.dtype)

    scores_KAS = _product(q_KAH[...], k_KSH, 2)
    if own.pages.scales:
        scale_KPS = own.pages.scales[0][buffer].astype(jnp.float32).reshape(K, -1, S)
        parts = [
            scores_KAS[:, p * A : (p + 1) * A] * scale_KPS[:, p : p + 1]
            for p in range(form.num_parts)
        ]
        scores_KAS = reduce(jnp.add, parts)
    position_1AS = entry + jax.lax.broadcasted_iota(jnp.int32, (1, A, S), 2)
    of_rows = partial(_of_rows, form.num_heads, (1, A, S))
    mask_1AS = (position_1AS >= of_rows(earliest)) & (position_1AS <= of_rows(latest))
    scores_KAS = jnp.where(mask_1AS, soft_cap(scores_KAS, form.cap), _MASKED_SCORE)
    old_KA1 = own.max_KA1[...]
    new_KA1 = jnp.maximum(old_KA1, scores_KAS.max(axis=2, keepdims=True))
    weights_KAS = jnp.where(mask_1AS, jnp.exp(scores_KAS - new_KA1), 0.0)
    decay_KA1 = jnp.exp(old_KA1 - new_KA1)
    own.max_KA1[...] = new_KA1
    own.sum_KA1[...] = decay_KA1 * own.sum_KA1[...] + weights_KAS.sum(axis=2, keepdims=True)
    if own.pages.scales:
        scale_KPS = own.pages.scales[-1][buffer].astype(jnp.float32).reshape(K, -1, S)
        weights_KAS = jnp.where(mask_1AS, weights_KAS * scale_KPS[:, :1], 0.0)
    added_KAH = _product(weights_KAS.astype(v_KSH.dtype), v_KSH, 1)
    own.sum_KAH[...] = decay_KA1 * own.sum_KAH[...] + added_KAH


def _of_rows(num_heads: int, shape: tuple[int, ...], scalars: list[Any]) -> Any:
    """The scalar of the token of each row of a product."""
    row_1AS = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    x_1AS = jnp.full(shape, scalars[0])
    for t, scalar in enumerate(scalars[1:], 1):
        x_1AS = jnp.where(row_1AS >= t * num_heads, scalar, x_1AS)
    return x_1AS


def _product(x_KAB: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """The product of each head over the last axis of x and an axis of y, in float32."""
    precisions = jax.lax.Precision
    precision = precisions.HIGHEST if x_KAB.dtype == jnp.float32 else precisions.DEFAULT
    contracted = (((2,), (axis,)), ((0,), (0,)))
    return jax.lax.dot_general(
        x_KAB, y, contracted, precision=precision, preferred_element_type=jnp.float32
    )
