"""Abstract arguments of every graph of a grid, one function for each kind of graph.

They are lowered, and callers must pass arrays of the same shapes. Logical axes go with the arrays;
the module that lowers turns them into shardings. Knows nothing of devices.
"""

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from ...modelzoo.attention.prompt_pieces import PromptPieces
from ...modelzoo.attention.shared_pages import SharedPages, SlotPages
from ...modelzoo.cache.layer_state import Cache
from ...modelzoo.cache.pages import PageCounts, allocate_pages
from ...modelzoo.layer_groups import block_layers
from ...modelzoo.sampling import SamplingState
from ...modelzoo.sampling_parameters import ARRAYS, GREEDY
from ...modelzoo.structure import BITS, StructureTables
from ..grids.bucket_grid import BucketGrid
from ..grids.prefill_bucket import PrefillBucket
from ..grids.structured_grid import CLASSES_OF_BLOCK, MAX_LEVELS, TOKENS_OF_BLOCK, StructuredGrid
from .prefill_steps import SlotRequests
from .steps import DecodeState

if TYPE_CHECKING:
    from ..abstract_model import AbstractModel

MAX_STOP_IDS = 48
"""Maximum number of ids that end one row: the model's and the caller's together."""
MAX_BIASES = 300


def decode_state(
    model: "AbstractModel",
    grid: BucketGrid,
    dtype: jnp.dtype,
    head_shards: int = 1,
) -> DecodeState:
    """An empty decode state of the grid; evaluate it abstractly for the signature.

    Args:
      model: The abstract model.
      grid: Slots, pages and length.
      dtype: Dtype of the cache.
      head_shards: Shards of the key/value heads of the cache.
    """
    config, B, V = model.config, grid.decode_slots, model.padded_vocab

    def zeros() -> jax.Array:
        # one buffer for each use: donated arguments must not share one
        return jnp.zeros(B, jnp.int32)

    cache: Cache = (None,) * len(block_layers(config, model.arrangement))
    if grid.pages is not None and grid.page is not None:
        counts = PageCounts(grid.pages, grid.page, B, grid.window_pages)
        cache = allocate_pages(config, counts, dtype, head_shards, model.arrangement)
    # a piece of a prompt is written with its padding
    num_tokens = grid.max_length
    if grid.chunks:
        num_tokens = grid.computed_length(num_tokens)
    return DecodeState(
        cache=cache,
        logits_BV=jnp.zeros((B, V), jnp.float32),
        tokens_BS=jnp.zeros((B, num_tokens), jnp.int32),
        prompt_length_B=zeros(),
        length_B=zeros(),
        limit_B=zeros(),
        is_active_B=jnp.zeros(B, bool),
        sampling=greedy_sampling(B, V, grid),
    )


def greedy_sampling(B: int, V: int, grid: BucketGrid | None = None, xp: Any = jnp) -> SamplingState:
    """Greedy sampling parameters, as for rows without any of their own.

    Args:
      B: The number of rows.
      V: The padded size of the vocabulary.
      grid: Tells whether rows have states of automata and adapters; None if they have neither.
      xp: The module that makes the arrays, jax.numpy or numpy.
    """
    is_structured = grid is not None and grid.structured is not None
    is_adapted = grid is not None and grid.adapters is not None
    return SamplingState(
        **{
            array: xp.full(B, getattr(GREEDY, name), dtype)
            for name, (array, dtype) in ARRAYS.items()
        },
        key_B2=xp.zeros((B, 2), jnp.uint32),
        sample_B=xp.zeros(B, jnp.int32),
        min_length_B=xp.zeros(B, jnp.int32),
        stop_ids_BX=xp.full((B, MAX_STOP_IDS), V, jnp.int32),
        bias_ids_BY=xp.full((B, MAX_BIASES), V, jnp.int32),
        bias_BY=xp.zeros((B, MAX_BIASES), jnp.float32),
        num_logprobs_B=xp.full(B, -1, jnp.int32),
        structure_B=xp.zeros(B, jnp.int32) if is_structured else None,
        adapter_B=xp.zeros(B, jnp.int32) if is_adapted else None,
    )


def prefill_arguments(
    model: "AbstractModel", grid: BucketGrid, bucket: PrefillBucket
) -> tuple[PromptPieces, SlotRequests, jax.ShapeDtypeStruct]:
    """Arguments of a prefill graph: `rows, requests, tokens_BT`."""
    B = bucket.batch
    int_B = jax.ShapeDtypeStruct((B,), jnp.int32)
    start_B = None if bucket.is_whole else int_B
    page_BN = _pages(grid, B, bucket.length)
    rows = PromptPieces._make((int_B, start_B, int_B, page_BN))
    sampling = _abstract_sampling(model, grid, B)
    tokens_BT = jax.ShapeDtypeStruct((B, bucket.tokens), jnp.int32)
    return rows, SlotRequests._make((int_B, int_B, sampling)), tokens_BT


def embed_arguments(bucket: PrefillBucket) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Arguments of an embedding graph: `tokens_BT, count_B, first_B`."""
    int_B = jax.ShapeDtypeStruct((bucket.batch,), jnp.int32)
    return jax.ShapeDtypeStruct((bucket.batch, bucket.tokens), jnp.int32), int_B, int_B


def score_arguments(model: "AbstractModel", grid: BucketGrid, bucket: PrefillBucket):
    """Arguments of a scoring graph: `rows, requests, tokens_BT, next_BT, num_logprobs_B`."""
    rows, requests, tokens_BT = prefill_arguments(model, grid, bucket)
    return rows, requests, tokens_BT, tokens_BT, rows.count_B


def fork_arguments(model: "AbstractModel", grid: BucketGrid):
    """Arguments of the fork graph: `source, slot`, the row's sampling parameters, and
    `source_page_N, page_N`."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    page_N = jax.ShapeDtypeStruct((grid.num_pages(grid.max_length),), jnp.int32)
    return number, number, _abstract_sampling(model, grid, 1), page_N, page_N


def decode_arguments(model: "AbstractModel", grid: BucketGrid) -> tuple[Any, ...]:
    """Arguments of the decode graph: `is_live_B`, `pages`, and `structures` in a plan that has
    automata."""
    slots, structured = grid.decode_slots, grid.structured
    pages = SlotPages._make((_pages(grid, slots, grid.max_length), _shared_pages(grid)))
    tables = () if structured is None else (_structure_tables(structured, model),)
    return jax.ShapeDtypeStruct((slots,), jnp.bool_), pages, *tables


def _shared_pages(grid: BucketGrid) -> SharedPages | None:
    if (prefixes := grid.prefixes) is None:
        return None
    shapes = (
        (prefixes.groups, prefixes.rows),
        (prefixes.groups, grid.prefix_pages(prefixes.length)),
        (prefixes.groups,),
    )
    return SharedPages._make(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)


def _pages(grid: BucketGrid, rows: int, length: int) -> jax.ShapeDtypeStruct | None:
    """The pages of rows of up to `length` entries; None in a plan without slots."""
    if grid.pages is None:
        return None
    return jax.ShapeDtypeStruct((rows, grid.num_pages(length)), jnp.int32)


def _structure_tables(structured: StructuredGrid, model: "AbstractModel") -> StructureTables:
    """The abstract tables of the automata of a plan."""
    S, K, V = structured.states, len(structured.schemas) + 1, model.padded_vocab

    def table(dtype: jax.typing.DTypeLike, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    return StructureTables._make(
        (
            table(jnp.int32, S, -(-structured.classes // CLASSES_OF_BLOCK)),
            table(jnp.int16, structured.move_blocks, CLASSES_OF_BLOCK),
            table(jnp.int32, S),
            table(jnp.int32, K),
            table(jnp.int16, K, V),
            table(jnp.int32, S, MAX_LEVELS),
            table(jnp.int32, S, MAX_LEVELS),
            table(jnp.int32, structured.masks, -(-V // TOKENS_OF_BLOCK)),
            table(jnp.uint32, structured.mask_blocks, TOKENS_OF_BLOCK // BITS),
        )
    )


def _abstract_sampling(model: "AbstractModel", grid: BucketGrid, B: int) -> SamplingState:
    return jax.eval_shape(lambda: greedy_sampling(B, model.padded_vocab, grid))
