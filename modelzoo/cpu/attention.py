"""Attention of rows to their pages, in float32; entries may be in bfloat16, or codes in int8.

A unit of work is a block of consecutive queries of a row and a key/value head: its tokens and query
heads are the rows of products. It reads the entries from the first to the last one that one of its
queries sees, in order, in *stretches* of so many that their scores stay in the cache of a core.
Results of stretches are merged as in Dao 2023, "FlashAttention-2" (2307.08691), section 3.1.

Knows nothing of windows or of positions: a query sees the entries from `low` on and before `high`.
Guarantees: a row's result depends on its own queries and entries alone; entries that no query of a
block sees are read as keys at most, and may hold anything.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from . import ENTRIES, attend_name
from .frames import Buffer, argument, is_coded, is_narrow, result, result_size, size
from .memory import call_address, free, load32, load_float, malloc, native, store_float
from .processor import Processor, Width
from .threads import Kernel
from .tiles import Form, Matrix, Others, product
from .vectors import (
    BYTES,
    LOWEST,
    capper,
    filler,
    rounder,
    scaler,
    softmax,
    transposer,
)

_BLOCK_ROWS = 96
"""The maximum number of rows of a product, unless one token has more heads."""
_PIECE = 64
"""The maximum number of entries whose keys are turned at a time; they are in one page."""
_STRETCH = 1024
"""Entries whose scores are kept at a time."""
_NONE, _LOWEST, _ONE = np.float32(0.0), np.float32(LOWEST), np.float32(1.0)
_INFINITY = np.float32(math.inf)


class _Block(NamedTuple):
    """A block of queries of a row and a key/value head: sizes, and addresses of its first one."""

    rows: int
    """Tokens times query heads."""
    heads: int
    """Query heads of a token."""
    token_heads: int
    """All query heads of a token, those of other key/value heads too."""
    head: int
    """The key/value head."""
    low: int
    """The address of the first entry that each token sees."""
    high: int
    """The address of the entry after the last one that each token sees."""
    first: int
    """The first entry that a token of the block sees."""
    begin: int
    """The multiple of the lanes up to this entry; scores begin there."""
    end: int
    """The entry after the last one."""
    page: int
    """The address of the numbers of the pages of the row."""


class _Scratch(NamedTuple):
    """Addresses of the memory of a block."""

    scores: int
    score_row: int
    """The bytes of a row of scores."""
    queries: int
    sums: int
    """The running sums of values."""
    turned: int
    """The keys of a piece, with features before entries."""
    decoded: int
    """The keys or values of a piece that are stored as codes."""
    largest: int
    """The largest score of each row so far."""
    totals: int
    """The running sum of the weights of each row."""


@native
def _block_tokens(frame: int) -> int:
    return max(1, _BLOCK_ROWS // size(frame, 0, 3))


@native
def _blocks_of_row(frame: int) -> int:
    tokens = _block_tokens(frame)
    return (size(frame, 0, 1) + tokens - 1) // tokens


def _counter(lanes: int) -> Any:
    """The function `count` of the kernel."""

    def count(frame: int) -> int:
        B, T, K = size(frame, 0, 0), size(frame, 0, 1), size(frame, 0, 2)
        S, H, V = size(frame, 1, 2), size(frame, 0, 4), size(frame, 2, 3)
        fits = size(frame, 1, 1) == K and size(frame, 1, 3) == H and size(frame, 2, 1) == K
        fits &= size(frame, 2, 0) == size(frame, 1, 0) and size(frame, 2, 2) == S
        fits &= H % lanes == 0 and V % lanes == 0 and S % lanes == 0
        fits &= size(frame, 5, 0) == 2
        fits &= size(frame, 3, 0) == B and result_size(frame, 0, 4) == V
        fits &= size(frame, 4, 0) == 2 and size(frame, 4, 1) == B and size(frame, 4, 2) == T
        if is_coded(frame, 1):
            for index in range(6, 8):
                for axis in range(3):
                    fits &= size(frame, index, axis) == size(frame, 1, axis)
        for axis in range(4):
            fits &= result_size(frame, 0, axis) == size(frame, 0, axis)
            fits &= result_size(frame, 1, axis) == size(frame, 0, axis)
        return B * K * _blocks_of_row(frame) if fits else -1

    return count


def _finder(lanes: int) -> Any:
    """A function that finds the block of a unit, and the index of its first token."""

    @native
    def find(frame, unit):
        T, K, G = size(frame, 0, 1), size(frame, 0, 2), size(frame, 0, 3)
        per_row, tokens = _blocks_of_row(frame), _block_tokens(frame)
        # blocks of later tokens see more, so they come first
        row, token = unit // (per_row * K), (per_row - 1 - unit % per_row) * tokens
        tokens, first = min(tokens, T - token), row * T + token
        low = argument(frame, 4) + 4 * first
        high = low + 4 * T * size(frame, 0, 0)
        num_entries = size(frame, 3, 1) * size(frame, 1, 2)
        first_seen, end = num_entries, 0
        for i in range(tokens):
            own_low, own_high = load32(low + 4 * i), min(load32(high + 4 * i), num_entries)
            if own_low < own_high:
                first_seen, end = min(first_seen, max(0, own_low)), max(end, own_high)
        page = argument(frame, 3) + 4 * row * size(frame, 3, 1)
        begin, head = first_seen // lanes * lanes, unit // per_row % K
        return _Block(tokens * G, G, K * G, head, low, high, first_seen, begin, end, page), first

    return find


@native
def _allocate(frame: int, block: _Block) -> tuple[int, _Scratch]:
    """Memory for a block, and its parts."""
    H, V, S = size(frame, 0, 4), size(frame, 2, 3), size(frame, 1, 2)
    length = min(max(block.end - block.begin, 0), _STRETCH) + _PIECE
    sizes = (
        block.rows * length,
        block.rows * H,
        block.rows * V,
        H * min(S, _PIECE),
        _PIECE * max(H, V) if is_coded(frame, 1) else 0,
        block.rows,
    )
    memory = call_address(malloc(), ((sum(sizes) + block.rows) * BYTES,))
    queries = memory + sizes[0] * BYTES
    sums = queries + sizes[1] * BYTES
    turned = sums + sizes[2] * BYTES
    decoded = turned + sizes[3] * BYTES
    largest = decoded + sizes[4] * BYTES
    totals = largest + sizes[5] * BYTES
    return memory, _Scratch(memory, length * BYTES, queries, sums, turned, decoded, largest, totals)


@native
def _number_bytes(frame: int) -> int:
    """The bytes of a number of keys and values."""
    if is_coded(frame, 1):
        return 1
    return 2 if is_narrow(frame, 1) else BYTES


@native
def _place(frame: int, block: _Block, entry: int) -> int:
    """The place of an entry among those of all pages and heads."""
    S = size(frame, 1, 2)
    # a number of a page outside is an error of the caller; nothing outside is read
    page = min(max(load32(block.page + entry // S * 4), 0), size(frame, 1, 0) - 1)
    return (page * size(frame, 1, 1) + block.head) * S + entry % S


@native
def _vectors(frame: int, index: int, block: _Block, entry: int) -> int:
    """The address of the key (index 1) or the value (2) of an entry."""
    vector = size(frame, index, 3) * _number_bytes(frame)
    return argument(frame, index) + _place(frame, block, entry) * vector


@native
def _piece_end(frame: int, entry: int, end: int) -> int:
    """The entry after the piece that begins with an entry."""
    S = size(frame, 1, 2)
    return min(end, entry + _PIECE, (entry // S + 1) * S)


@native
def _ahead(frame: int, index: int, block: _Block, entry: int, end: int) -> int:
    """The distance from the keys or values of a piece to those of the next; 0 without one."""
    after = _piece_end(frame, entry, end)
    if after == end:
        return 0
    return _vectors(frame, index, block, after) - _vectors(frame, index, block, entry)


def _pairer(processor: Processor) -> Any:
    """A function that says whether keys are multiplied as pairs of bfloat16, and not in float32."""
    has_pair_products, units = processor.has_pair_products, 2 * processor.width.lanes

    @native
    def is_paired(frame):
        return has_pair_products and is_narrow(frame, 1) and size(frame, 0, 4) % units == 0

    return is_paired


def _decoder(lanes: int) -> Any:
    """A function that writes keys or values in codes as numbers, and returns their address."""
    scale_codes = scaler(lanes, of_codes=True)

    @native
    def decode(frame, index, block, scratch, entry, count):
        features = size(frame, index, 3)
        codes = _vectors(frame, index, block, entry)
        scales = argument(frame, index + 5) + _place(frame, block, entry) * BYTES
        for i in range(count):
            to = scratch.decoded + i * features * BYTES
            scale_codes(to, codes + i * features, features, load_float(scales + i * BYTES))
        return scratch.decoded

    return decode


def _scorer(processor: Processor) -> Any:
    """A function that writes the scores of the entries of a stretch."""
    lanes, is_paired = processor.width.lanes, _pairer(processor)
    multiply = product(processor.width, Form(fetches=True))
    has_pairs = processor.has_pair_products
    multiply_pairs = product(processor.width, Form(has_pairs, has_pairs, fetches=True))
    turn, turn_narrow = transposer(lanes), transposer(lanes, is_narrow=True)
    decode = _decoder(lanes)

    @native
    def score(frame, block, scratch, begin, end):
        H, entry, num_bytes = size(frame, 0, 4), begin, _number_bytes(frame)
        has_codes = num_bytes == 1
        if has_codes:
            num_bytes = BYTES
        # a pair is moved as a number of 32 bits
        is_pair, row = is_paired(frame), H * num_bytes
        if is_pair:
            H, num_bytes = H // 2, BYTES
        while entry < end:
            after = _piece_end(frame, entry, end)
            # pages have whole vectors of entries
            count = (after - entry + lanes - 1) // lanes * lanes
            keys, ahead = _vectors(frame, 1, block, entry), _ahead(frame, 1, block, entry, end)
            if has_codes:
                keys, ahead = decode(frame, 1, block, scratch, entry, count), 0
            # memory goes on to send the next keys while these are multiplied
            after_turned = ahead + keys - scratch.turned if ahead != 0 else 0
            for i in range(0, count, lanes):
                for j in range(0, H, lanes):
                    to = scratch.turned + (j * count + i) * BYTES
                    of = keys + i * row + j * num_bytes
                    if num_bytes == BYTES:
                        turn((to, count * BYTES, of, row, ahead))
                    else:
                        turn_narrow((to, count * BYTES, of, row, ahead))
            out = Matrix(scratch.scores + (entry - begin) * BYTES, scratch.score_row)
            queries = Matrix(scratch.queries, H * BYTES)
            turned = Matrix(scratch.turned, count * BYTES)
            if is_pair:
                multiply_pairs(
                    block.rows, count, H, queries, turned, out, Others(after_turned, 0, 0)
                )
            else:
                multiply(block.rows, count, H, queries, turned, out, Others(after_turned, 0, 0))
            entry = after

    return score


def _weigher(lanes: int) -> Any:
    """A function that turns the products of a stretch into weights, and updates the running sums.

    Scores are products of queries and keys times a factor, and may be capped.
    """
    weigh, cap, scale = softmax(lanes), capper(lanes), scaler(lanes)

    @native
    def weigh_row(frame, scratch, row, scores, count):
        """Weigh a row; padding after its scores is overwritten."""
        padded, factors = (count + lanes - 1) // lanes * lanes, argument(frame, 5)
        factor, most = load_float(factors), load_float(factors + BYTES)
        if most > _NONE:
            scale(scores, scores, padded, factor)
            cap(scores, scores, padded, most)
            factor = _ONE
        lowest = _LOWEST / factor
        for i in range(count, padded):
            store_float(scores + i * BYTES, lowest)
        largest, totals = scratch.largest + row * BYTES, scratch.totals + row * BYTES
        old, V = load_float(largest), size(frame, 2, 3)
        new, total = weigh(scores, padded, factor, old)
        decay = np.exp(old - new)
        store_float(largest, new)
        store_float(totals, load_float(totals) * decay + total)
        if decay < _ONE:
            sums = scratch.sums + row * V * BYTES
            scale(sums, sums, V, decay)

    @native
    def weigh_all(frame, block, scratch, begin, end):
        for row in range(block.rows):
            token, scores = row // block.heads, scratch.scores + row * scratch.score_row
            low = max(begin, load32(block.low + 4 * token)) - begin
            high = min(end, load32(block.high + 4 * token)) - begin
            if low < high:
                weigh_row(frame, scratch, row, scores + low * BYTES, high - low)
            else:
                low = high = 0
            # what this row does not see, others of the block may see
            for i in range(low):
                store_float(scores + i * BYTES, _NONE)
            for i in range(high, end - begin):
                store_float(scores + i * BYTES, _NONE)

    return weigh_all


def _adder(width: Width) -> Any:
    """A function that adds the weighted values of a stretch to the running sums."""
    add = product(width, Form(adds=True, fetches=True))
    add_narrow = product(width, Form(is_narrow=True, adds=True, fetches=True))
    decode = _decoder(width.lanes)

    @native
    def add_values(frame, block, scratch, begin, end):
        V, entry, num_bytes = size(frame, 2, 3), max(begin, block.first), _number_bytes(frame)
        has_codes = num_bytes == 1
        if has_codes:
            num_bytes = BYTES
        while entry < end:
            after = _piece_end(frame, entry, end)
            place, ahead = _vectors(frame, 2, block, entry), _ahead(frame, 2, block, entry, end)
            if has_codes:
                place, ahead = decode(frame, 2, block, scratch, entry, after - entry), 0
            x = Matrix(scratch.scores + (entry - begin) * BYTES, scratch.score_row)
            values, sums = Matrix(place, V * num_bytes), Matrix(scratch.sums, V * BYTES)
            if num_bytes == BYTES:
                add(block.rows, V, after - entry, x, values, sums, Others(ahead, 0, 0))
            else:
                add_narrow(block.rows, V, after - entry, x, values, sums, Others(ahead, 0, 0))
            entry = after

    return add_values


def _writer(lanes: int) -> Any:
    """A function that divides the sums of a block, and writes its results."""
    fill, scale = filler(lanes), scaler(lanes)

    @native
    def write(frame, block, scratch, first):
        V = size(frame, 2, 3)
        for row in range(block.rows):
            token, head = row // block.heads, row % block.heads
            place = (first + token) * block.token_heads + block.head * block.heads + head
            out, lse = result(frame, 0) + place * V * BYTES, result(frame, 1) + place * BYTES
            total = load_float(scratch.totals + row * BYTES)
            if total == _NONE:
                fill(out, V, _NONE)
                store_float(lse, -_INFINITY)
            else:
                scale(out, scratch.sums + row * V * BYTES, V, _ONE / total)
                store_float(lse, load_float(scratch.largest + row * BYTES) + np.log(total))

    return write


def attention_kernels(processor: Processor) -> list[Kernel]:
    """The kernels for a processor, which differ by the dtype of entries.

    Their arguments are queries `q_BTKGH`, `k_PKSH`, `v_PKSH`, the pages `page_BN` of rows, the
    first entry that a query sees and the one after the last, `seen_2BT`, two factors: that of
    scores, and their cap or 0 for none, and the scales `k_scale_PKS` and `v_scale_PKS` of codes.
    The results are `out_BTKGH` and `lse_BTKG`. Features and entries of pages are a multiple of the
    lanes of a vector. Queries of entries in bfloat16 may be rounded to it.
    """
    lanes, is_paired = processor.width.lanes, _pairer(processor)
    find, score, weigh_all = _finder(lanes), _scorer(processor), _weigher(lanes)
    add_values, write = _adder(processor.width), _writer(lanes)
    fill, copy, copy_rounded = filler(lanes), scaler(lanes), rounder(lanes)

    def run(frame: int, unit: int) -> int:
        block, first = find(frame, unit)
        memory, scratch = _allocate(frame, block)
        if memory == 0:
            return 1
        H, V = size(frame, 0, 4), size(frame, 2, 3)
        q = argument(frame, 0)
        for token in range(block.rows // block.heads):
            place = (first + token) * block.token_heads + block.head * block.heads
            numbers = block.heads * H
            if is_paired(frame):
                to = scratch.queries + token * numbers * BYTES // 2
                copy_rounded(to, q + place * H * BYTES, numbers, _ONE)
            else:
                to = scratch.queries + token * numbers * BYTES
                copy(to, q + place * H * BYTES, numbers, _ONE)
        fill(scratch.sums, block.rows * V, _NONE)
        for row in range(block.rows):
            store_float(scratch.largest + row * BYTES, _LOWEST)
            store_float(scratch.totals + row * BYTES, _NONE)
        begin = block.begin
        while begin < block.end:
            end = min(begin + _STRETCH, block.end)
            score(frame, block, scratch, begin, end)
            weigh_all(frame, block, scratch, begin, end)
            add_values(frame, block, scratch, begin, end)
            begin = end
        write(frame, block, scratch, first)
        call_address(free(), (memory,))
        return 0

    results, counted = (Buffer("float32", 5), Buffer("float32", 4)), _counter(lanes)
    others = Buffer("int32", 2), Buffer("int32", 3), Buffer("float32", 1)
    scales = (Buffer("float32", 3),) * 2
    return [
        Kernel(
            attend_name(dtype),
            (results[0], *(Buffer(dtype, 4),) * 2, *others, *scales * (dtype == "int8")),
            results,
            counted,
            run,
        )
        for dtype in ENTRIES
    ]
