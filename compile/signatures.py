"""Abstract arguments of every graph of a grid: what is lowered, and what callers must pass.

Knows nothing of devices; placements are added by whoever lowers. One function a graph kind.
"""

import jax
import jax.numpy as jnp

from ..modelzoo import kv_cache
from ..modelzoo.config import DecoderConfig
from ..modelzoo.sampling import SamplingState
from .bucket_grid import BucketGrid, PrefillBucket
from .steps import DecodeState

MAX_STOP_IDS = 48
"""Ids that may end one row: the model's own and the caller's."""
MAX_BIASES = 300


def decode_state(config: DecoderConfig, grid: BucketGrid, dtype: jnp.dtype) -> DecodeState:
    """An empty decode state of the grid; evaluate abstractly for its signature."""
    B, V = grid.decode_slots, config.vocab_size

    def zeros() -> jax.Array:
        # one buffer each: donated arguments must not share
        return jnp.zeros(B, jnp.int32)

    return DecodeState(
        cache=kv_cache.allocate(config, B, grid.decode_spans, dtype),
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


def prefill_arguments(bucket: PrefillBucket) -> tuple[jax.ShapeDtypeStruct, ...]:
    """`tokens_BT, true_length_B`."""
    return (
        jax.ShapeDtypeStruct((bucket.batch, bucket.length), jnp.int32),
        jax.ShapeDtypeStruct((bucket.batch,), jnp.int32),
    )


def score_arguments(bucket: PrefillBucket) -> tuple[jax.ShapeDtypeStruct, ...]:
    """`tokens_BT, true_length_B, num_logprobs_B`."""
    return (*prefill_arguments(bucket), jax.ShapeDtypeStruct((bucket.batch,), jnp.int32))


def insert_arguments(config: DecoderConfig):
    """`row, slot, limit_1` and the row's sampling parameters."""
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    sampling = jax.eval_shape(lambda: greedy_sampling(1, config.vocab_size))
    return scalar, scalar, jax.ShapeDtypeStruct((1,), jnp.int32), sampling


def live_mask(grid: BucketGrid) -> jax.ShapeDtypeStruct:
    """`is_live_B` of a decode call."""
    return jax.ShapeDtypeStruct((grid.decode_slots,), jnp.bool_)
