"""Packs requests into the numpy arrays that a graph takes; the caller transfers them explicitly.

`count_B` is the only array that tells tokens from padding. Dummy rows have a count of zero, so no
expert capacity is reserved for them. Does not know about text.
"""

from collections.abc import Sequence

import jax
import numpy as np

from ...compile.graphs.prefill_steps import SlotRequests
from ...compile.graphs.signatures import MAX_BIASES, MAX_STOP_IDS, greedy_sampling
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.prefill_bucket import PrefillBucket
from ...modelzoo.attention.prompt_pieces import PromptPieces
from ...modelzoo.attention.shared_pages import SharedPages, SlotPages
from ...modelzoo.sampling import SamplingState
from ...modelzoo.sampling_parameters import ARRAYS
from ..request import SamplingParams, hashed_seed
from .actions import PromptPiece, ScheduledRequest, ScheduledSequence, SharedGroup


def pack_pieces(
    rows: Sequence[PromptPiece],
    prompts: Sequence[Sequence[int]],
    bucket: PrefillBucket,
    num_slots: int,
    page_BN: np.ndarray | None = None,
) -> tuple[PromptPieces, np.ndarray, np.ndarray]:
    """Pack the pieces of one prefill call.

    Args:
      rows: The pieces, at most `bucket.batch`.
      prompts: The token ids of each row's whole prompt.
      bucket: The bucket, which gives the shapes.
      num_slots: The number of decode slots; this value in `slot_B` means no slot.
      page_BN: The pages of each row's slot; None in a plan without pages.

    Returns:
      The slot, start and count of each row; `tokens_BT`, padded with zeros on the right; `next_BT`,
      the token that follows each token in the prompt. Dummy rows have no slot and no tokens.
    """
    shape = (bucket.batch, bucket.tokens)
    tokens_BT, next_BT = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    slot_B = np.full(bucket.batch, num_slots, np.int32)
    start_B, count_B = np.zeros_like(slot_B), np.zeros_like(slot_B)
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        end = row.start + row.count
        tokens_BT[i, : row.count] = prompt[row.start : end]
        following = prompt[row.start + 1 : end + 1]
        next_BT[i, : len(following)] = following
        start_B[i], count_B[i] = row.start, row.count
        if row.slot is not None:
            slot_B[i] = row.slot
    start_B = None if bucket.is_whole else start_B
    pieces = PromptPieces._make((slot_B, start_B, count_B, page_BN))
    return pieces, tokens_BT, next_BT


def pack_greedy(
    prompts: Sequence[Sequence[int]],
    first_slot: int,
    bucket: PrefillBucket,
    grid: BucketGrid,
    vocab_size: int,
) -> tuple[PromptPieces, SlotRequests, np.ndarray]:
    """Pack whole prompts into slots from `first_slot` on, with greedy sampling.

    In a grid with pages, each slot has pages of its own (see `own_pages`).

    Returns:
      The pieces, the slot requests and `tokens_BT`.
    """
    requests = [
        ScheduledRequest(0, len(prompt), grid.max_length, 1, is_scored=False) for prompt in prompts
    ]
    rows = [
        PromptPiece(first_slot + i, ScheduledSequence(request, 0), 0, request.prompt_length)
        for i, request in enumerate(requests)
    ]
    page_BN = own_pages(grid, range(first_slot, first_slot + len(rows)), bucket.length)
    if page_BN is not None:
        padding = (0, bucket.batch - len(rows)), (0, 0)
        page_BN = np.pad(page_BN, padding, constant_values=grid.pages or 0)
    pieces, tokens_BT, _ = pack_pieces(rows, prompts, bucket, grid.decode_slots, page_BN=page_BN)
    greedy = [greedy_sampling(1, vocab_size, grid, np)] * len(requests)
    return pieces, pack_requests(requests, greedy, bucket.batch), tokens_BT


def own_pages(grid: BucketGrid, slots: Sequence[int], length: int) -> np.ndarray | None:
    """The pages of slots that share none, up to a length; None in a grid without slots.

    The grid has pages for the longest rows in all slots.
    """
    if grid.pages is None:
        return None
    assert grid.pages >= grid.most_pages
    first_B1 = grid.num_pages(grid.max_length) * np.asarray(slots, np.int32)[:, None]
    return first_B1 + np.arange(grid.num_pages(length), dtype=np.int32)


def decode_pages(grid: BucketGrid) -> SlotPages:
    """The argument `pages` of the decode graph, if slots share no pages."""
    page_BN = own_pages(grid, range(grid.decode_slots), grid.max_length)
    assert page_BN is not None
    return SlotPages._make((page_BN, pack_shared((), page_BN, grid)))


def pack_shared(
    groups: Sequence[SharedGroup], page_BN: np.ndarray, grid: BucketGrid
) -> SharedPages | None:
    """Pack the pages that groups of slots read once; None in a grid without planned prefixes.

    Args:
      groups: The groups of a decode call.
      page_BN: The pages of every slot.
      grid: The grid, which gives the shapes.
    """
    if (prefixes := grid.prefixes) is None:
        return None
    slot_GR = np.full((prefixes.groups, prefixes.rows), grid.decode_slots, np.int32)
    page_GN = np.full(
        (prefixes.groups, grid.prefix_pages(prefixes.length)), grid.pages or 0, np.int32
    )
    end_G = np.zeros(prefixes.groups, np.int32)
    for index, slots, num_pages in groups:
        slot_GR[index, : len(slots)] = slots
        # equal tokens have equal entries, so the pages of any row of the group serve all
        page_GN[index, :num_pages] = page_BN[slots[0], :num_pages]
        end_G[index] = num_pages * (grid.page or 0)
    return SharedPages._make((slot_GR, page_GN, end_G))


def pack_requests(
    requests: Sequence[ScheduledRequest], sampling: Sequence[SamplingState], batch: int
) -> SlotRequests:
    """Pack lengths and sampling parameters of a call's rows for their slots.

    Dummy rows repeat the last row; they have no slot, so the values have no effect.
    """
    num_dummies = batch - len(requests)
    requests = [*requests, *[requests[-1]] * num_dummies]
    sampling = [*sampling, *[sampling[-1]] * num_dummies]
    prompt_length_B = np.array([request.prompt_length for request in requests], np.int32)
    limit_B = np.array([request.max_total_length for request in requests], np.int32)
    sampling_B = jax.tree.map(lambda *fields: np.concatenate(fields), *sampling)
    return SlotRequests._make((prompt_length_B, limit_B, sampling_B))


def pack_sampling(
    params: SamplingParams,
    sequence: ScheduledSequence,
    *,
    seed: int,
    stop_ids: Sequence[int],
    vocab_size: int,
    structure: int | None = None,
    adapter: int | None = None,
) -> SamplingState:
    """The sampling parameters of one sequence, as numpy arrays with a leading axis of one.

    Args:
      params: The parameters of the request.
      sequence: The sequence. Its sample is an index from 0 to `n - 1`; the length of its prompt
        turns `min_tokens` into a length.
      seed: A 64-bit seed; its halves are the key.
      stop_ids: Ids that end the sequence.
      vocab_size: The padded vocabulary size, which fills the unused places of id arrays.
      structure: The first state of the automaton of the answer, 0 without one; None in a plan
        without automata.
      adapter: The number of the row's adapter, 0 without one; None in a plan without adapters.
    """
    bias = params.logit_bias or {}
    min_length = sequence.request.prompt_length + params.min_tokens
    num_logprobs = -1 if params.logprobs is None else params.logprobs
    fields = {
        **{
            array: np.array([getattr(params, name)], dtype)
            for name, (array, dtype) in ARRAYS.items()
        },
        "key_B2": np.array([[seed >> 32 & 0xFFFFFFFF, seed & 0xFFFFFFFF]], np.uint32),
        "sample_B": np.array([sequence.sample], np.int32),
        "min_length_B": np.array([min_length], np.int32),
        "stop_ids_BX": _filled(stop_ids, MAX_STOP_IDS, vocab_size),
        "bias_ids_BY": _filled(list(bias), MAX_BIASES, vocab_size),
        "bias_BY": _filled(list(bias.values()), MAX_BIASES, 0.0),
        "num_logprobs_B": np.array([num_logprobs], np.int32),
        "structure_B": None if structure is None else np.array([structure], np.int32),
        "adapter_B": None if adapter is None else np.array([adapter], np.int32),
    }
    return SamplingState(**fields)


def row_seed(params: SamplingParams, run_seed: int, request_id: str) -> int:
    """The 64-bit seed of a request: its own, or a hash of the run's seed and the request's id."""
    own = params.seed
    return hashed_seed(run_seed, request_id) if own is None else own & 0xFFFFFFFFFFFFFFFF


def _filled(values: Sequence[float], size: int, fill: float) -> np.ndarray:
    dtype = np.float32 if isinstance(fill, float) else np.int32
    row = np.full((1, size), fill, dtype)
    row[0, : len(values)] = values
    return row
