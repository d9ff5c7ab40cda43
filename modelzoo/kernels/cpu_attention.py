"""Attention on the CPU by a kernel of our own, which skips what a query does not see.

It serves the pages of decode steps and of pieces of prompts, and whole prompts, each of which is a
page of its own. The kernel works in float32 whatever the dtype of queries is.

Knows nothing of layers or meshes. Guarantees: equals `attend_in_groups` and `attend_dense` up to
the order of sums, `lse` included; a row's bits depend on its queries, positions and entries alone.
"""

import jax
import jax.numpy as jnp

from ..attention.attend import Visibility, first_visible
from ..attention.paged import PagedRows
from ..axes import LANES
from ..cache.entry_codes import EntryCodes, block_size
from ..cache.state_spec import Entries
from ..cache.stripes import EMPTY_POSITION
from ..cpu import attend_name
from ..cpu.objects import is_loaded
from ..layer_config import PLAIN_SCORES, BothSides, Scores, Window
from .call import AttentionCall
from .paged_rows import refusal_of_all

STEP = 16
"""Features and entries are a multiple of it: the lanes of the widest vectors."""


def cpu_refusal(call: AttentionCall) -> str | None:
    """The reason why the kernel cannot serve a call, or None if it can."""
    if not is_loaded():
        return "the kernels for the CPU are not loaded (extra noria[cpu])"
    if call.page is not None and (reason := refusal_of_all(call)) is not None:
        return reason
    if call.page is None and not call.is_in_order:
        return "it takes whole prompts whose tokens lie in order on one device"
    if call.codes not in (None, "int8"):
        return f"it takes codes in int8 alone, got {call.codes} (numbers.cache)"
    if call.codes and call.splits:
        return "it takes no latents in codes (numbers.cache)"
    if call.codes and block_size(call.key_dim) != call.key_dim:
        return (
            f"it takes codes of heads of at most {LANES} features, or of no multiple of {LANES}, "
            f"got {call.key_dim}"
        )
    for size in (call.key_dim, call.value_dim):
        if size % STEP:
            return f"it takes heads of a multiple of {STEP} features, got {size}"
    if call.page is not None and call.page % STEP:
        return f"it takes pages of a multiple of {STEP} entries, got {call.page} (buckets.page)"
    return None


def attend_pages_cpu(
    q_BTKGH: jax.Array,
    k_PKSH: Entries,
    v_PKSH: Entries,
    rows: PagedRows,
    window: Window = None,
    scores: Scores = PLAIN_SCORES,
) -> tuple[jax.Array, jax.Array]:
    """Attend as `attend_in_groups` does; see `AttendPages`."""
    position_BT = rows.position_BT(q_BTKGH.shape[1])
    low_BT = _first_seen(position_BT, window)
    high_BT = position_BT + 1
    if rows.begin_B is not None:
        low_BT = jnp.maximum(low_BT, rows.begin_B[:, None])
    if rows.end_B is not None:
        high_BT = jnp.minimum(high_BT, rows.end_B[:, None])
    high_BT = jnp.where(position_BT == EMPTY_POSITION, 0, high_BT)
    return _attend(q_BTKGH, k_PKSH, v_PKSH, rows.page_BN, (low_BT, high_BT), scores)


def attend_prompts_cpu(
    q_BTKGH: jax.Array,
    k_BKHS: jax.Array,
    v_BKSH: jax.Array,
    visibility: Visibility,
    scores: Scores = PLAIN_SCORES,
) -> tuple[jax.Array, jax.Array]:
    """Attend as `attend_dense` does, to whole prompts whose tokens lie in order."""
    assert visibility.is_in_order, "the entries that a query sees are computed from indices"
    B, T = q_BTKGH.shape[:2]
    is_key_BS = jnp.broadcast_to(visibility.key_position_BS != EMPTY_POSITION, (B, T))
    count_B1 = is_key_BS.sum(axis=1, keepdims=True)
    index_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    window, high_BT = visibility.window, index_BT + 1
    if isinstance(window, BothSides):
        high_BT = T if window.reach is None else index_BT + window.reach + 1
        high_BT = jnp.minimum(high_BT, count_B1)
    seen_BT = _first_seen(index_BT, window), jnp.where(index_BT < count_B1, high_BT, 0)
    page_B1 = jnp.arange(B)[:, None]
    k_BKSH, v_BKSH = (_whole_vectors(x) for x in (k_BKHS.swapaxes(-1, -2), v_BKSH))
    return _attend(q_BTKGH, k_BKSH, v_BKSH, page_B1, seen_BT, scores)


def _whole_vectors(x_BKSH: jax.Array) -> jax.Array:
    """Keys or values with padding entries, so that their number is a multiple of the step."""
    padding = -x_BKSH.shape[2] % STEP
    return jnp.pad(x_BKSH, ((0, 0), (0, 0), (0, padding), (0, 0)))


def _first_seen(position_BT: jax.Array, window: Window) -> jax.Array:
    """The first position that queries see."""
    if window is None:
        return jnp.zeros_like(position_BT)
    return jnp.maximum(first_visible(position_BT, window), 0)


def _attend(
    q_BTKGH: jax.Array,
    k_PKSH: Entries,
    v_PKSH: Entries,
    page_BN: jax.Array,
    seen_BT: tuple[jax.Array, jax.Array],
    scores: Scores,
) -> tuple[jax.Array, jax.Array]:
    """Attend to the entries of pages from the first to before the second of `seen_BT`."""
    scale = q_BTKGH.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    dtype, entries, scales = _as_kernels_read(k_PKSH, v_PKSH)
    factors = jnp.array([scale, scores.cap or 0.0], jnp.float32)
    integers = (x.astype(jnp.int32) for x in (page_BN, jnp.stack(seen_BT)))
    shape = q_BTKGH.shape[:-1]
    results = (
        jax.ShapeDtypeStruct((*shape, entries[1].shape[-1]), jnp.float32),
        jax.ShapeDtypeStruct(shape, jnp.float32),
    )
    call = jax.ffi.ffi_call(attend_name(dtype), results)
    out_BTKGH, lse_BTKG = call(q_BTKGH.astype(jnp.float32), *entries, *integers, factors, *scales)
    return out_BTKGH.astype(q_BTKGH.dtype), lse_BTKG


def _as_kernels_read(
    *keys_values: Entries,
) -> tuple[str, list[jax.Array], list[jax.Array]]:
    """The dtype in the name of the kernel, keys and values, and the scales of those in codes."""
    arrays: list[jax.Array] = []
    scales: list[jax.Array] = []
    for x in keys_values:
        if isinstance(x, EntryCodes):
            arrays.append(x.codes.squeeze(2))
            scales.append(x.scale_BKPS.squeeze(2).astype(jnp.float32))
        else:
            arrays.append(x)
    if scales:
        return "int8", arrays, scales
    dtype = "bfloat16" if all(x.dtype == jnp.bfloat16 for x in arrays) else "float32"
    return dtype, [x.astype(dtype) for x in arrays], scales
