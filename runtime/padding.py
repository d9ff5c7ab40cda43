"""Requests to the arrays that a graph takes: host numpy first, then one explicit transfer.

Knows nothing of scheduling or text. `true_length_B` is the only word of padding; dummy rows have
no token, so that nothing is set aside for them.
"""

import hashlib
from collections.abc import Sequence

import numpy as np

from ..compile.bucket_grid import PrefillBucket
from ..compile.signatures import MAX_BIASES, MAX_STOP_IDS
from ..modelzoo.chunk_cache import ChunkRows
from ..modelzoo.sampling import SamplingState
from .chunk_scheduler import ChunkOfPrompt
from .request import SamplingParams


def pack_prompts(
    prompts: Sequence[Sequence[int]], bucket: PrefillBucket
) -> tuple[np.ndarray, np.ndarray]:
    """`tokens_BT, true_length_B` of prompts that fit the bucket, right-padded with zeros."""
    tokens_BT = np.zeros((bucket.batch, bucket.length), np.int32)
    true_length_B = np.zeros(bucket.batch, np.int32)
    for row, prompt in enumerate(prompts):
        tokens_BT[row, : len(prompt)] = prompt
        true_length_B[row] = len(prompt)
    return tokens_BT, true_length_B


def pack_chunks(
    rows: Sequence[ChunkOfPrompt],
    prompts: Sequence[Sequence[int]],
    bucket: PrefillBucket,
    num_slots: int,
) -> tuple[ChunkRows, np.ndarray, np.ndarray]:
    """Which tokens rows have, `tokens_BT`, and the prompts' next tokens as `next_BT`.

    Dummy rows are of no slot.
    """
    shape = (bucket.batch, bucket.tokens)
    tokens_BT, next_BT = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    slot_B, start_B, count_B = (np.zeros(shape[0], np.int32) for _ in range(3))
    slot_B[:] = num_slots
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        end = row.start + row.count
        tokens_BT[i, : row.count] = prompt[row.start : end]
        following = prompt[row.start + 1 : end + 1]
        next_BT[i, : len(following)] = following
        slot_B[i], start_B[i], count_B[i] = row.slot, row.start, row.count
    return ChunkRows._make((slot_B, start_B, count_B)), tokens_BT, next_BT


def pack_sampling(
    params: SamplingParams,
    *,
    seed: int,
    sample: int,
    prompt_length: int,
    stop_ids: Sequence[int],
    vocab_size: int,
) -> SamplingState:
    """One row's sampling parameters, as numpy arrays with a leading axis of one."""
    bias = params.logit_bias or {}
    num_logprobs = -1 if params.logprobs is None else params.logprobs
    fields = {
        "temperature_B": np.array([params.temperature], np.float32),
        "top_k_B": np.array([max(params.top_k, 0)], np.int32),
        "top_p_B": np.array([params.top_p], np.float32),
        "min_p_B": np.array([params.min_p], np.float32),
        "presence_B": np.array([params.presence_penalty], np.float32),
        "frequency_B": np.array([params.frequency_penalty], np.float32),
        "repetition_B": np.array([params.repetition_penalty], np.float32),
        "key_B2": np.array([[seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF]], np.uint32),
        "sample_B": np.array([sample], np.int32),
        "min_length_B": np.array([prompt_length + params.min_tokens], np.int32),
        "stop_ids_BX": _filled(stop_ids, MAX_STOP_IDS, vocab_size),
        "bias_ids_BY": _filled(list(bias), MAX_BIASES, vocab_size),
        "bias_BY": _filled(list(bias.values()), MAX_BIASES, 0.0),
        "num_logprobs_B": np.array([num_logprobs], np.int32),
    }
    return SamplingState(**fields)


def row_seed(params: SamplingParams, run_seed: int, request_id: str) -> int:
    """The row's own seed, or one derived from the run's seed and the request's id: 64 bits."""
    if params.seed is not None:
        return params.seed & 0xFFFFFFFFFFFFFFFF
    digest = hashlib.sha256(f"{run_seed}\0{request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def _filled(values: Sequence[float], size: int, fill: float) -> np.ndarray:
    dtype = np.float32 if isinstance(fill, float) else np.int32
    row = np.full((1, size), fill, dtype)
    row[0, : len(values)] = values
    return row
