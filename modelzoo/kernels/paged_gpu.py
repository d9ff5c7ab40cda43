"""A kernel for GPUs of the Hopper generation that reads the live pages of a pool only.

It serves single tokens and tiles of prompts. A block of threads serves one block of queries and one
key/value head. One of its two groups of warps copies pages to the memory of the core, in the order
of the row, while the other attends to those that have come: from the first page in which its
queries see an entry to the page of its own last token. Queries of several tokens and heads are the
rows of one product of 64 rows.

Knows nothing of layers, pools or meshes. Guarantees: equals `attend_in_groups` up to the order of
sums, `lse` included; the bits of a row depend on its queries, positions and entries alone, not on
the numbers of its pages, its place in the batch or the rows beside it; values after the last
position of a row may hold anything. Sources: Kwon et al. 2023, "Efficient Memory Management for
Large Language Model Serving with PagedAttention" (2309.06180); Shah et al. 2024, "FlashAttention-3"
(2407.08608), section 3.1, for the groups of warps.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..attention.paged import PagedRows
from ..layer_config import PLAIN_SCORES, Scores, Window
from .call import AttentionCall
from .paged_rows import QueryBlocks, ReadPages, refusal_of_all

ROWS = 64
"""The rows of a product: tokens times heads of a group."""
ROWS_STORED = 8
"""Rows that are copied at a time."""
HEAD_DIMS, PAGES = (64, 128, 256), (64, 128)
DEVICES = "h100", "h200"
"""The kinds of GPUs that have the instructions of the kernel."""
SHARED_BYTES, MAX_SHARED_BYTES = 112 * 2**10, 192 * 2**10
"""The memory of a core for keys and values that lets two blocks of threads share a core, and the
maximum."""
MIN_STAGES, MAX_STAGES = 2, 4
"""The minimum and maximum pages that are on their way at a time."""
_MASKED_SCORE = -1e30
_LOG2_E = math.log2(math.e)


class Form(NamedTuple):
    """Static facts of a call."""

    blocks: QueryBlocks
    page: int
    stages: int
    cap: float | None


class Shared(NamedTuple):
    """Memory of a core, and the barriers that tell when it is filled and when it is free."""

    q_AH: Any
    k_OSH: Any
    v_OSH: Any
    lse_A: Any
    q_is_here: Any
    k_is_here: Any
    v_is_here: Any
    k_is_free: Any
    v_is_free: Any


def paged_gpu_refusal(call: AttentionCall) -> str | None:
    """The reason why the kernel cannot serve a call, or None if it can."""
    if (reason := refusal_of_all(call)) is not None:
        return reason
    assert call.page is not None
    if call.device not in DEVICES:
        return f"it takes GPUs of the Hopper generation, got {call.device or 'others'}"
    if call.page not in PAGES:
        return f"it takes pages of {PAGES[0]} or {PAGES[1]} entries, got {call.page} (buckets.page)"
    if call.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 and float16, got {call.dtype.name}"
    if call.codes is not None:
        return "it takes no cache in codes (numbers.cache)"
    if call.splits:
        return "it takes no latents"
    if call.key_dim != call.value_dim or call.key_dim not in HEAD_DIMS:
        return (
            f"it takes heads of 64, 128 or 256 features, got {call.key_dim} for keys and "
            f"{call.value_dim} for values"
        )
    if _num_stages(call.page, call.key_dim) == 0:
        return (
            f"pages of {call.page} entries of {call.key_dim} features are too large for the memory "
            f"of a core: set buckets.page to {PAGES[0]}"
        )
    if call.group > ROWS:
        return f"it takes at most {ROWS} query heads of a key/value head, got {call.group}"
    return None


def attend_pages_gpu(
    q_BTKGH: jax.Array,
    k_PKSH: jax.Array,
    v_PKSH: jax.Array,
    rows: PagedRows,
    window: Window = None,
    scores: Scores = PLAIN_SCORES,
) -> tuple[jax.Array, jax.Array]:
    """Attend as `attend_in_groups` does; see `AttendPages`."""
    _, T, _, G, H = q_BTKGH.shape
    page = k_PKSH.shape[2]
    blocks = QueryBlocks.of(q_BTKGH, ROWS // G, ROWS_STORED, window)
    form = Form(blocks, page, _num_stages(page, H), scores.cap)
    q_CKAH, read = blocks.split(q_BTKGH, scores, H), blocks.read_pages(rows, page)
    out_CKAH, lse_CKA = _call(q_CKAH, (k_PKSH, v_PKSH), rows.page_BN, read, form)
    return blocks.join(out_CKAH, T), blocks.join(lse_CKA[..., None], T)[..., 0]


def _num_stages(page: int, head_dim: int) -> int:
    """The pages that are on their way at a time; 0 if not even two fit."""
    num_bytes = 4 * page * head_dim
    if MIN_STAGES * num_bytes > MAX_SHARED_BYTES:
        return 0
    return max(MIN_STAGES, min(MAX_STAGES, SHARED_BYTES // num_bytes))


def _call(
    q_CKAH: jax.Array,
    pages: tuple[jax.Array, jax.Array],
    page_BN: jax.Array,
    read: ReadPages,
    form: Form,
) -> tuple[jax.Array, jax.Array]:
    """Call the kernel with queries whose tokens and heads are the rows of a product."""
    # imported late: only starts with this kernel spend the tenth of a second that Pallas takes
    import jax.experimental.pallas.mosaic_gpu as plgpu

    C, K, A, H = q_CKAH.shape
    tiles = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
    tiled = partial(plgpu.SMEM, transforms=tiles)
    stages = form.stages, form.page, H
    barriers = [plgpu.Barrier(num_barriers=form.stages) for _ in range(4)]
    kernel = plgpu.kernel(
        partial(_attend, form),
        out_type=(
            jax.ShapeDtypeStruct((C, K, A, H), q_CKAH.dtype),
            jax.ShapeDtypeStruct((C, K, A), jnp.float32),
        ),
        scratch_types=[
            tiled((ROWS, H), q_CKAH.dtype),
            *(tiled(stages, x.dtype) for x in pages),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(),
            *barriers,
        ],
        grid=(K, C),
        grid_names=("head", "block"),
        num_threads=2,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )
    return kernel(q_CKAH, *pages, page_BN.astype(jnp.int32), *read)


def _attend(form: Form, q_CKAH: Any, k_PKSH: Any, v_PKSH: Any, page_BN: Any, *refs: Any) -> None:
    """Serve one block of queries and one key/value head."""
    from jax.experimental import pallas as pl

    head, block = jax.lax.axis_index("head"), jax.lax.axis_index("block")
    results, shared = refs[4:6], Shared(*refs[6:])
    read = ReadPages(*(x_C[block] for x_C in refs[:4]))

    @pl.when(jax.lax.axis_index("group") == 1)
    def _() -> None:
        place = form.blocks.row(block), head
        _load(form, (k_PKSH, v_PKSH, page_BN), read, shared, place)

    @pl.when(jax.lax.axis_index("group") == 0)
    def _() -> None:
        own = [x.at[block, head] for x in (q_CKAH, *results)]
        _attend_block(form, own, read, shared)


def _load(
    form: Form,
    pool: tuple[Any, Any, Any],
    read: ReadPages,
    shared: Shared,
    place: tuple[Any, Any],
) -> None:
    """Copy the pages of a block to the core, each as soon as there is room for it."""
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax.experimental import pallas as pl

    row, head = place
    k_PKSH, v_PKSH, page_BN = pool
    first, num_pages = read.first_page_C, read.end_page_C - read.first_page_C

    def wait(i: Any) -> None:
        stage = jax.lax.rem(i, jnp.int32(form.stages))
        plgpu.barrier_wait(shared.k_is_free.at[stage])
        plgpu.barrier_wait(shared.v_is_free.at[stage])

    def copy(i: Any, _: None) -> None:
        stage = jax.lax.rem(i, jnp.int32(form.stages))

        @pl.when(i >= form.stages)
        def _() -> None:
            wait(i)

        page = page_BN[row, first + i]
        plgpu.copy_gmem_to_smem(
            k_PKSH.at[page, head], shared.k_OSH.at[stage], shared.k_is_here.at[stage]
        )
        plgpu.copy_gmem_to_smem(
            v_PKSH.at[page, head], shared.v_OSH.at[stage], shared.v_is_here.at[stage]
        )

    jax.lax.fori_loop(0, num_pages, copy, None)
    start = jnp.maximum(0, num_pages - form.stages)
    jax.lax.fori_loop(start, num_pages, lambda i, _: wait(i), None)


def _attend_block(form: Form, own: list[Any], read: ReadPages, shared: Shared) -> None:
    """Attend from a block of queries to its pages as they come."""
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax.experimental import pallas as pl

    q_AH, *results = own
    stored = pl.ds(0, form.blocks.num_rows)
    plgpu.copy_gmem_to_smem(q_AH, shared.q_AH.at[stored], shared.q_is_here)
    plgpu.barrier_wait(shared.q_is_here)
    first, end = read.first_page_C, read.end_page_C
    A, H = shared.q_AH.shape
    per_row = plgpu.Layout.WGMMA.reduce(1)
    max_A = plgpu.layout_cast(jnp.full((A,), _MASKED_SCORE, jnp.float32), per_row)
    sum_A = plgpu.layout_cast(jnp.zeros((A,), jnp.float32), per_row)
    sum_AH = plgpu.layout_cast(jnp.zeros((A, H), jnp.float32), plgpu.Layout.WGMMA)

    def add(i: Any, running: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        return _add_page(form, shared, read, i, running)

    max_A, sum_A, sum_AH = jax.lax.fori_loop(0, end - first, add, (max_A, sum_A, sum_AH))
    # queries without a token are masked in all entries
    is_empty_A = max_A < _MASKED_SCORE / 2
    safe_A = jnp.where(is_empty_A, 1.0, sum_A)
    factor_A = jnp.where(is_empty_A, 0.0, 1.0) / safe_A
    out_AH = sum_AH * jax.lax.broadcast_in_dim(factor_A, sum_AH.shape, [0])
    shared.q_AH[...] = out_AH.astype(shared.q_AH.dtype)
    lse_A = (max_A + jnp.log2(safe_A)) * (1 / _LOG2_E)
    shared.lse_A[...] = jnp.where(is_empty_A, -jnp.inf, lse_A)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(shared.q_AH.at[stored], results[0])
    plgpu.copy_smem_to_gmem(shared.lse_A.at[stored], results[1])
    plgpu.wait_smem_to_gmem(0)


def _add_page(form: Form, shared: Shared, read: ReadPages, i: Any, running: Any) -> Any:
    """Add a page to the running maximum, in powers of two, and to the sums of a block."""
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax.experimental import pallas as pl

    index = read.first_page_C + i
    max_A, sum_A, sum_AH = running
    stage = jax.lax.rem(i, jnp.int32(form.stages))
    k_SH, v_SH = shared.k_OSH.at[stage], shared.v_OSH.at[stage]

    def scores(product_AS: Any) -> Any:
        plgpu.wgmma(product_AS, shared.q_AH, plgpu.transpose_ref(k_SH, (1, 0)))
        return product_AS[...]

    plgpu.barrier_wait(shared.k_is_here.at[stage])
    scores_AS = pl.run_scoped(scores, plgpu.WGMMAAccumulatorRef((ROWS, form.page), jnp.float32))
    plgpu.barrier_arrive(shared.k_is_free.at[stage])
    scores_AS = _masked(form, _soft_cap(scores_AS, form.cap), read, index * form.page)
    new_A = jnp.maximum(max_A, scores_AS.max(axis=1) * _LOG2_E)
    decay_A = jnp.exp2(max_A - new_A)
    weights_AS = jnp.exp2(
        scores_AS * _LOG2_E - jax.lax.broadcast_in_dim(new_A, scores_AS.shape, [0])
    )
    sum_A = sum_A * decay_A + weights_AS.sum(axis=1)
    sum_AH = sum_AH * jax.lax.broadcast_in_dim(decay_A, sum_AH.shape, [0])
    plgpu.barrier_wait(shared.v_is_here.at[stage])

    @pl.when(index + 1 == read.end_page_C)
    def _() -> None:
        _clear_after(v_SH, read.first_C + read.count_C - 1 - index * form.page)

    def add(total_AH: Any) -> None:
        plgpu.wgmma(total_AH, weights_AS.astype(v_SH.dtype), v_SH)

    sum_AH = pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(sum_AH))
    plgpu.barrier_arrive(shared.v_is_free.at[stage])
    return new_A, sum_A, sum_AH


def _clear_after(v_SH: Any, last: Any) -> None:
    """Put zeros after the last entry of a block: what other rows left there may not be finite."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    values_SH = plgpu.load(v_SH, (), layout=plgpu.Layout.WGMMA)
    entry_SH = plgpu.broadcasted_iota(jnp.int32, v_SH.shape, 0, layout=plgpu.Layout.WGMMA)
    v_SH[...] = jnp.where(entry_SH <= last, values_SH, jnp.zeros_like(values_SH))
    plgpu.commit_smem()


def _soft_cap(x: Any, cap: float | None) -> Any:
    """The cap of scores, by powers of two: the approximate tanh of a GPU has 11 bits."""
    if cap is None:
        return x
    return cap - 2 * cap / (jnp.exp2(x * (2 * _LOG2_E / cap)) + 1)


def _masked(form: Form, scores_AS: Any, read: ReadPages, start: Any) -> Any:
    """Scores of the entries that queries see; others are so small that their weights are zero."""
    import jax.experimental.pallas.mosaic_gpu as plgpu

    row_AS, entry_AS = (
        plgpu.broadcasted_iota(jnp.int32, scores_AS.shape, axis, layout=plgpu.Layout.WGMMA)
        for axis in (0, 1)
    )
    is_seen_AS = form.blocks.sees(row_AS, entry_AS + start, read.first_C, read.count_C)
    return jnp.where(is_seen_AS, scores_AS, _MASKED_SCORE)
