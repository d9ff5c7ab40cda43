"""A kernel for TPU that reads the live pages of a pool, for single tokens and tiles of prompts.

Blocks of queries are processed one after another. A block reads its pages in order, from the first
in which its queries see an entry to the page of its own last token. Each turn reads a few pages of
all heads, while those of the turn before are used. The first turn of a block is read during the
last turn of the block before. Scores and weights never leave the chip.

Knows nothing of layers, pools or meshes. Guarantees: equals `attend_in_groups` up to the order of
sums, `lse` included; the bits of a row depend on its queries, positions and entries alone, not on
the numbers of its pages, its place in the batch or the rows beside it; entries after the last
position of a row may hold anything. Sources: Kwon et al. 2023, "Efficient Memory Management for
Large Language Model Serving with PagedAttention" (2309.06180); Dao 2023, "FlashAttention-2"
(2307.08691), section 3.1, for the single division of results at the end.
"""

from functools import partial, reduce
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..attention.attend import soft_cap
from ..attention.paged import PagedRows
from ..axes import LANES
from ..cache.entry_codes import EntryCodes, numbers, rotate
from ..cache.state_spec import Entries
from ..layer_config import PLAIN_SCORES, Scores, Window
from .call import AttentionCall
from .paged_rows import QueryBlocks, ReadPages, refusal_of_all

MAX_ROWS = 2048
"""The maximum queries of a block: tokens times heads. With latents of 640 features, they, their
results and the sums in float32 take half of the on-chip memory."""
MAX_TABLE = 2**17
"""The maximum number of pages in the table of a call: half of the 1 MiB of scalar memory."""
TURN_ENTRIES, TURN_BYTES = 256, 2**20
"""The maximum entries of a turn of several pages, and the maximum bytes of their vectors."""
SUBLANES = 8
VMEM_BYTES = 64 * 2**20
"""The limit of on-chip memory for the kernel."""
_MASKED_SCORE = -1e30


class Schedule(NamedTuple):
    """Scalars that tell which pages each block reads."""

    page: Any
    """The table of pages, row by row."""
    later_C: Any
    """The next block that reads something; the number of blocks if there is none."""
    read: ReadPages


class Pages(NamedTuple):
    """Arrays of keys and values, in the pool or on the chip; one array if it has both."""

    entries: list[Any]
    """Entries with axes of pages, heads, entries and features; heads times blocks if in codes."""
    scales: list[Any]
    """The scales of entries in codes; empty without codes."""

    @classmethod
    def of(cls, k_PKSH: Entries, v_PKSH: Entries) -> "Pages":
        """The arrays of the pool."""
        if not isinstance(k_PKSH, EntryCodes):
            return cls(_distinct(k_PKSH, v_PKSH), [])
        assert isinstance(v_PKSH, EntryCodes), "values are in codes if keys are"
        scales = _distinct(k_PKSH.scale_BKPS, v_PKSH.scale_BKPS)
        # heads and parts are one axis: XLA would pad an axis of one part to the rows of a tile
        scales = [x.reshape(len(x), -1, x.shape[-1]) for x in scales]
        codes = _distinct(k_PKSH.codes, v_PKSH.codes)
        return cls([x.reshape(len(x), -1, *x.shape[3:]) for x in codes], scales)


def _distinct(keys: Any, values: Any) -> list[Any]:
    return [keys] if keys is values else [keys, values]


class Codes(NamedTuple):
    """Static facts of codes, or of entries that are not in codes; see `EntryCodes`."""

    splits: tuple[int, ...] = ()
    key_halves: tuple[int, ...] = ()
    value_halves: tuple[int, ...] = ()

    @classmethod
    def of(cls, k_PKSH: Entries, v_PKSH: Entries) -> "Codes":
        """The facts of keys and values."""
        if not isinstance(k_PKSH, EntryCodes):
            return cls()
        assert isinstance(v_PKSH, EntryCodes), "values are in codes if keys are"
        return cls(k_PKSH.splits, k_PKSH.halves, v_PKSH.halves)


class Form(NamedTuple):
    """Static facts of a call."""

    blocks: QueryBlocks
    num_pages: int
    """Entries of the table for a row."""
    codes: Codes
    value_dim: int
    page: int
    turn: int
    """Pages of a turn."""
    cap: float | None


class Buffers(NamedTuple):
    """On-chip memory: two turns of each array, and the running result of a block."""

    pages: Pages
    semaphores: Any
    turns: Any
    """The number of turns so far; every second turn uses the second buffer."""
    max_KA1: Any
    sum_KA1: Any
    sum_KAH: Any


def paged_tpu_refusal(call: AttentionCall) -> str | None:
    """The reason why the kernel cannot serve a call, or None if it can."""
    if (reason := refusal_of_all(call)) is not None:
        return reason
    assert call.page is not None
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
            f"{call.table}: larger pages (buckets.page), fewer rows (buckets.decode_slots and "
            f"buckets.prefill) or a lower buckets.max_length make it smaller"
        )
    if call.codes is not None:
        return _codes_refusal(call, call.page)
    least = SUBLANES * 4 // call.dtype.itemsize
    if call.page % least:
        return f"it takes pages of {least} entries or more, got {call.page} (buckets.page)"
    return None


def _codes_refusal(call: AttentionCall, page: int) -> str | None:
    """The reason why the kernel cannot serve a cache in codes, or None if it can.

    XLA keeps the scales of smaller pages in another memory layout where tokens are written, and
    would copy all of them for the kernel.
    """
    if rank := next((split for split in call.splits if split % LANES), None):
        return f"it takes codes of latents of a multiple of {LANES} features, got {rank}"
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
    _, T, K, G, _ = q_BTKGH.shape
    page, num_pages = k_PKSH.shape[2], rows.page_BN.shape[1]
    pages, codes = Pages.of(k_PKSH, v_PKSH), Codes.of(k_PKSH, v_PKSH)
    turn = min(num_pages, _pages_of_turn(pages, page))
    blocks = QueryBlocks.of(q_BTKGH, MAX_ROWS // (K * G), SUBLANES, window)
    form = Form(blocks, num_pages, codes, v_PKSH.shape[-1], page, turn, scores.cap)

    q_CKAH = blocks.split(q_BTKGH, scores, k_PKSH.shape[-1])
    if codes.key_halves:
        q_CKAH = rotate(q_CKAH, codes.splits).astype(q_CKAH.dtype)
    out_CKAH, lse_C1A = _call(q_CKAH, pages, _schedule(rows, form), form)
    if codes.value_halves:
        out_CKAH = rotate(out_CKAH, codes.splits).astype(out_CKAH.dtype)
    lse_CKA1 = lse_C1A.reshape(*out_CKAH.shape[:-1], 1)
    return blocks.join(out_CKAH, T), blocks.join(lse_CKA1, T)[..., 0]


def _pages_of_turn(pages: Pages, page: int) -> int:
    """The pages of a turn. Scales of several pages would lie side by side, in whole lanes."""
    if pages.scales and page % LANES:
        return 1
    entry = sum(x.size // x.shape[0] // page * x.dtype.itemsize for x in pages.entries)
    return max(1, min(TURN_ENTRIES, TURN_BYTES // entry) // page)


def _schedule(rows: PagedRows, form: Form) -> Schedule:
    """The pages that each block reads."""
    read = form.blocks.read_pages(rows, form.page)
    C = len(read.count_C)
    block_C = jnp.where(read.end_page_C > read.first_page_C, jnp.arange(C), C)
    later_C = jax.lax.cummin(jnp.append(block_C[1:], C), reverse=True)
    return Schedule(rows.page_BN.ravel().astype(jnp.int32), later_C.astype(jnp.int32), read)


def _call(
    q_CKAH: jax.Array, pages: Pages, schedule: Schedule, form: Form
) -> tuple[jax.Array, jax.Array]:
    """Call the kernel with queries whose tokens and heads are the rows of a product."""
    # imported late: only starts with this kernel spend the tenth of a second that Pallas takes
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    C, K, A, _ = q_CKAH.shape
    results = (
        jax.ShapeDtypeStruct((C, K, A, form.value_dim), q_CKAH.dtype),
        jax.ShapeDtypeStruct((C, 1, K * A), jnp.float32),
    )
    size = form.turn * form.page
    scratch = Buffers(
        Pages(
            [pltpu.VMEM((2, x.shape[1], size, x.shape[-1]), x.dtype) for x in pages.entries],
            [pltpu.VMEM((2, x.shape[1], size), x.dtype) for x in pages.scales],
        ),
        pltpu.SemaphoreType.DMA((2,)),
        pltpu.SMEM((1,), jnp.int32),
        *(pltpu.VMEM((K, A, size), jnp.float32) for size in (1, 1, form.value_dim)),
    )
    # the kernel copies pages itself
    in_hbm = jax.tree.map(lambda _: pl.BlockSpec(memory_space=pltpu.HBM), pages)
    return pl.pallas_call(
        partial(_attend_block, form),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(C,),
            in_specs=[_block_of(q_CKAH), in_hbm],
            out_specs=tuple(map(_block_of, results)),
            scratch_shapes=[scratch],
        ),
        out_shape=results,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=_largest_work(q_CKAH, pages, form),
        name="paged",
    )(schedule, q_CKAH, pages)


def _largest_work(q_CKAH: jax.Array, pages: Pages, form: Form) -> Any:
    """The work of a call whose rows have all pages that they may have.

    Each page is in one row. Rows of several queries may be tiles of the same prompt, and each block
    reads all pages of its row.
    """
    from jax.experimental import pallas as pl

    C, K, A, key_dim = q_CKAH.shape
    pool = pages.entries[0].shape[0]
    num_pages = C * form.num_pages
    if form.blocks.per_row * form.blocks.num_tokens == 1:
        num_pages = min(pool, num_pages)
    results = C * K * A * (form.value_dim * q_CKAH.dtype.itemsize + 4)
    num_entries = num_pages * form.page
    return pl.CostEstimate(
        flops=2 * num_entries * K * A * (key_dim + form.value_dim),
        transcendentals=num_entries * K * A,
        bytes_accessed=sum(x.nbytes for x in jax.tree.leaves(pages)) // pool * num_pages
        + q_CKAH.nbytes
        + results,
    )


def _block_of(x: Any) -> Any:
    """The part of an array that belongs to one block of queries."""
    from jax.experimental import pallas as pl

    return pl.BlockSpec((None, *x.shape[1:]), lambda c, *_: (c, *(0,) * (len(x.shape) - 1)))


def _attend_block(
    form: Form,
    schedule: Schedule,
    q_KAH: Any,
    pages: Pages,
    out_KAH: Any,
    lse_1A: Any,
    own: Buffers,
) -> None:
    """Attend from one block of queries to its pages."""
    from jax.experimental import pallas as pl

    c, C = pl.program_id(0), pl.num_programs(0)
    num_turns = _num_turns(schedule, form, c)
    reader = partial(_turn_copies, form, schedule, pages, own)

    @pl.when(c == 0)
    def _() -> None:
        own.turns[0] = 0
        first = jnp.where(num_turns > 0, 0, schedule.later_C[0])

        @pl.when(first < C)
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
        next_block = jnp.where(is_last, schedule.later_C[c], c)

        @pl.when(next_block < C)
        def _() -> None:
            reader((next_block, jnp.where(is_last, 0, turn + 1), 1 - buffer), "start")

        reader((c, turn, buffer), "wait")
        entry = (schedule.read.first_page_C[c] + turn * form.turn) * form.page
        read = schedule.read
        tokens = read.first_C[c], read.count_C[c], read.end_page_C[c] * form.page
        _add_turn(form, q_KAH, own, tokens, (entry, buffer))

    jax.lax.fori_loop(0, num_turns, take_turn, None)
    is_empty_KA1 = own.max_KA1[...] < _MASKED_SCORE / 2
    out = jnp.where(is_empty_KA1, 0.0, own.sum_KAH[...] / own.sum_KA1[...])
    out_KAH[...] = out.astype(out_KAH.dtype)
    lse = jnp.where(is_empty_KA1, -jnp.inf, own.max_KA1[...] + jnp.log(own.sum_KA1[...]))
    # registers hold vectors along lanes: transpose the column to get a row
    lse_A1 = lse.reshape(-1, 1)
    lse_1A[...] = jnp.broadcast_to(lse_A1, (len(lse_A1), LANES)).T[:1]


def _num_turns(schedule: Schedule, form: Form, c: Any) -> Any:
    """The turns of a block."""
    num_pages = schedule.read.end_page_C[c] - schedule.read.first_page_C[c]
    return jax.lax.div(num_pages + form.turn - 1, form.turn)


def _turn_copies(
    form: Form,
    schedule: Schedule,
    pages: Pages,
    own: Buffers,
    place: tuple[Any, Any, Any],
    act: str,
) -> None:
    """Start the copies of a turn of a block to a buffer, or wait for them."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    c, turn, buffer = place
    first = form.blocks.row(c) * form.num_pages
    for i in range(form.turn):
        index = schedule.read.first_page_C[c] + turn * form.turn + i

        @pl.when(index < schedule.read.end_page_C[c])
        def _(index: Any = index, i: int = i) -> None:
            page = schedule.page[first + index]
            own_S = pl.ds(i * form.page, form.page)
            for x, to in zip(jax.tree.leaves(pages), jax.tree.leaves(own.pages), strict=True):
                copy = pltpu.make_async_copy(
                    x.at[page], to.at[buffer, :, own_S], own.semaphores.at[buffer]
                )
                getattr(copy, act)()


def _add_turn(
    form: Form, q_KAH: Any, own: Buffers, tokens: tuple[Any, Any, Any], place: tuple[Any, Any]
) -> None:
    """Add the entries of a turn, which are in a buffer, to the running result of a block."""
    (first, count, end), (entry, buffer) = tokens, place
    K, A, _ = own.sum_KAH.shape
    S = form.turn * form.page
    # a turn may have pages after the last one, which hold anything
    last = jnp.minimum(first + count, end) - 1
    is_entry_1S1 = entry + jax.lax.broadcasted_iota(jnp.int32, (1, S, 1), 1) <= last
    k_KSH, v_KSH = (
        numbers(_joined(entries[buffer], K), halves, q_KAH.dtype)
        for entries, halves in (
            (own.pages.entries[0], form.codes.key_halves),
            (own.pages.entries[-1], form.codes.value_halves),
        )
    )
    v_KSH = jnp.where(is_entry_1S1, v_KSH, 0)
    parts = [
        _product(q_KAH[:, :, start:stop], k_KSH[:, :, start:stop], 2)
        for start, stop in pairwise((0, *form.codes.splits, k_KSH.shape[-1]))
    ]
    if own.pages.scales:
        scale_KPS = own.pages.scales[0][buffer].astype(jnp.float32).reshape(K, -1, S)
        parts = [part * scale_KPS[:, p : p + 1] for p, part in enumerate(parts)]
    scores_KAS = reduce(jnp.add, parts)
    row_1AS, entry_1AS = (jax.lax.broadcasted_iota(jnp.int32, (1, A, S), i) for i in (1, 2))
    mask_1AS = form.blocks.sees(row_1AS, entry + entry_1AS, first, count)
    mask_1AS &= entry + entry_1AS <= last
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


def _joined(x: jax.Array, num_heads: int) -> jax.Array:
    """Entries of heads, whose features may be in blocks."""
    if len(x) == num_heads:
        return x
    blocks = x.reshape(num_heads, -1, *x.shape[1:])
    return jnp.concatenate([blocks[:, n] for n in range(blocks.shape[1])], axis=2)


def _product(x_KAB: jax.Array, y: jax.Array, axis: int) -> jax.Array:
    """The product of each head over the last axis of x and an axis of y, in float32."""
    precisions = jax.lax.Precision
    precision = precisions.HIGHEST if x_KAB.dtype == jnp.float32 else precisions.DEFAULT
    contracted = (((2,), (axis,)), ((0,), (0,)))
    return jax.lax.dot_general(
        x_KAB, y, contracted, precision=precision, preferred_element_type=jnp.float32
    )
