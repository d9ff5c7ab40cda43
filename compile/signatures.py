"""Abstract arguments of every graph of a grid: what is lowered, and what callers must pass.

Knows nothing of devices: logical axes go with the arrays, and whoever lowers turns them into
placements. One function a graph kind.
"""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ..modelzoo import kv_cache
from ..modelzoo.prompt_pieces import PromptPieces
from ..modelzoo.sampling import SamplingState
from .grids.bucket_grid import BucketGrid, PrefillBucket
from .prefill_steps import SlotRequests
from .steps import DecodeState

if TYPE_CHECKING:
    from .definition import Definition

MAX_STOP_IDS = 48
"""Ids that may end one row: the model's own and the caller's."""
MAX_BIASES = 300


def decode_state(
    definition: "Definition",
    grid: BucketGrid,
    dtype: jnp.dtype,
    num_cache_heads: int | None = None,
    cache_stripes: int = 1,
) -> DecodeState:
    """An empty decode state of the grid; evaluate abstractly for its signature."""
    config, B, V = definition.config, grid.decode_slots, definition.padded_vocab

    def zeros() -> jax.Array:
        # one buffer each: donated arguments must not share
        return jnp.zeros(B, jnp.int32)

    return DecodeState(
        cache=kv_cache.allocate(
            config,
            B,
            grid.decode_spans,
            dtype,
            num_cache_heads,
            cache_stripes,
            grid.span_slots,
            definition.arrangement,
            grid.chunks[0] if grid.chunks else None,
        ),
        logits_BV=jnp.zeros((B, V), jnp.float32),
        tokens_BS=jnp.zeros((B, grid.max_length), jnp.int32),
        prompt_length_B=zeros(),
        length_B=zeros(),
        limit_B=zeros(),
        is_active_B=jnp.zeros(B, bool),
        sampling=greedy_sampling(B, V),
    )


def greedy_sampling(B: int, V: int) -> SamplingState:
    """Sampling parameters of rows that ask for nothing."""
    return SamplingState(
        temperature_B=jnp.zeros(B),
        top_k_B=jnp.zeros(B, jnp.int32),
        top_p_B=jnp.ones(B),
        min_p_B=jnp.zeros(B),
        presence_B=jnp.zeros(B),
        frequency_B=jnp.zeros(B),
        repetition_B=jnp.ones(B),
        key_B2=jnp.zeros((B, 2), jnp.uint32),
        sample_B=jnp.zeros(B, jnp.int32),
        min_length_B=jnp.zeros(B, jnp.int32),
        stop_ids_BX=jnp.full((B, MAX_STOP_IDS), V, jnp.int32),
        bias_ids_BY=jnp.full((B, MAX_BIASES), V, jnp.int32),
        bias_BY=jnp.zeros((B, MAX_BIASES)),
        num_logprobs_B=jnp.full(B, -1, jnp.int32),
    )


def prefill_arguments(
    definition: "Definition", bucket: PrefillBucket
) -> tuple[PromptPieces, SlotRequests, jax.ShapeDtypeStruct]:
    """`rows, requests, tokens_BT`."""
    B = bucket.batch
    of_row = jax.ShapeDtypeStruct((B,), jnp.int32)
    rows = PromptPieces._make((of_row, None if bucket.is_whole else of_row, of_row))
    sampling = jax.eval_shape(lambda: greedy_sampling(B, definition.padded_vocab))
    tokens_BT = jax.ShapeDtypeStruct((B, bucket.tokens), jnp.int32)
    return rows, SlotRequests._make((of_row, of_row, sampling)), tokens_BT


def score_arguments(definition: "Definition", bucket: PrefillBucket):
    """`rows, requests, tokens_BT, next_BT, num_logprobs_B`."""
    rows, requests, tokens_BT = prefill_arguments(definition, bucket)
    return rows, requests, tokens_BT, tokens_BT, rows.count_B


def fork_arguments(definition: "Definition"):
    """`source, slot` and the row's sampling parameters."""
    number = jax.ShapeDtypeStruct((), jnp.int32)
    return number, number, jax.eval_shape(lambda: greedy_sampling(1, definition.padded_vocab))


def live_mask(grid: BucketGrid) -> jax.ShapeDtypeStruct:
    """`is_live_B` of a decode call."""
    return jax.ShapeDtypeStruct((grid.decode_slots,), jnp.bool_)
