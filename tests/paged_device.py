"""A device of tokens: its pages hold the tokens of rows instead of keys, for tests of the host.

The next token of a row is a hash of all tokens that its pages hold, of its key and of its sample.
So a page that is shared, copied, cleared or taken wrongly changes the outputs. Pages that slots
have of their own, for windows, hold the latest tokens of their rows, which are checked.
"""

from types import SimpleNamespace
from zlib import crc32

import numpy as np

from noria.compile.graphs.graph_kinds import GraphKey
from noria.compile.graphs.prefill_steps import PrefillOutput
from noria.compile.graphs.steps import NO_TOKEN, DecodeOutput
from noria.compile.grids.bucket_grid import BucketGrid
from noria.modelzoo.sampling import TokenScores
from noria.runtime.engine.admission import Admission
from noria.runtime.engine.generation import GenerationSession
from noria.runtime.engine.slot_calls import SlotCalls

VOCAB = 151
NOT_FINITE = 150
"""The token that makes a row non-finite; only prompts have it."""
EOS_ID = 2
WINDOW = 10


def next_token(context, key: int, sample: int) -> int:
    """Return the token that follows a context."""
    return 3 + crc32(np.array([*context, key, sample], np.int64).tobytes()) % (NOT_FINITE - 3)


def answer(prompt, key: int, sample: int, limit: int, stop_ids=()) -> list[int]:
    """Return the tokens that a row emits, without a device."""
    tokens = list(prompt)
    while NOT_FINITE not in prompt and len(tokens) < limit:
        tokens.append(next_token(tokens, key & 0xFFFFFFFF, sample))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


class PagedDevice:
    """Runs the calls of graphs on pages of tokens, and checks each call."""

    def __init__(self, grid: BucketGrid):
        self.grid, self.host = grid, SimpleNamespace(fetch=lambda output: output)
        slots = grid.decode_slots
        self.entries = np.zeros((grid.pages, grid.page), np.int64)
        self.tokens = [[] for _ in range(slots)]
        self.limit, self.sample, self.key = np.zeros((3, slots), np.int64)
        self.stop_ids = [()] * slots
        self.is_active = np.zeros(slots, bool)
        self.num_cleared = self.num_copied = 0
        self.own = np.zeros((slots, grid.window_pages(WINDOW) or 0, grid.page), np.int64)
        """The pages that each slot has of its own, for a layer with a window."""

    def call(self, call):
        match call.key:
            case GraphKey("fork", _):
                return self._fork(*call.arguments)
            case GraphKey("decode"):
                return self._decode(*call.arguments)
            case GraphKey(_, bucket):
                return self._prefill(bucket, *call.arguments)

    def _check_group(self, slot, page_N):
        """Check that the pages of a slot are those of its group."""
        groups = self.grid.slot_groups or 1
        of_slot = slot * groups // self.grid.decode_slots
        assert (page_N[page_N < self.grid.pages] * groups // self.grid.pages == of_slot).all()

    def _set_sampling(self, slot, sampling, row):
        self.sample[slot] = sampling.sample_B[row]
        self.key[slot] = sampling.key_B2[row, 1]
        self.stop_ids[slot] = tuple(sampling.stop_ids_BX[row])

    def _fork(self, source, slot, sampling, source_page_N, page_N):
        for source_page, page in zip(source_page_N, page_N, strict=True):
            if page >= self.grid.pages:
                break
            copied = source_page < self.grid.pages
            self.num_copied += copied
            self.entries[page] = self.entries[source_page] if copied else 0
            self.num_cleared += not copied
        if slot < self.grid.decode_slots:
            exists = source < self.grid.decode_slots
            self.tokens[slot] = list(self.tokens[source]) if exists else []
            self.limit[slot] = self.limit[source] if exists else 0
            self.is_active[slot] = exists and self.is_active[source]
            self.own[slot] = self.own[source] if exists else 0
            self._set_sampling(slot, sampling, 0)

    def _prefill(self, bucket, pieces, requests, tokens_BT, next_BT=None, num_logprobs_B=None):
        assert pieces.page_BN.shape == (bucket.batch, self.grid.num_pages(bucket.length))
        is_clean_B = np.ones(bucket.batch, bool)
        in_window = []
        for row, count in enumerate(pieces.count_B):
            slot, start = pieces.slot_B[row], 0 if pieces.start_B is None else pieces.start_B[row]
            if not count or slot >= self.grid.decode_slots:
                assert (pieces.page_BN[row] == self.grid.pages).all()
                continue
            new = tokens_BT[row, :count].tolist()
            self._check_group(slot, pieces.page_BN[row])
            context = self._read(pieces.page_BN[row], start)
            is_clean_B[row] = NOT_FINITE not in [*context, *new]
            self.tokens[slot] = context + new
            self._write(slot, pieces.page_BN[row], start, new)
            first_seen = count if bucket.is_whole else start + 1
            in_window.append((slot, first_seen, self.tokens[slot]))
            self.limit[slot] = requests.limit_B[row]
            length = requests.prompt_length_B[row]
            self.is_active[slot] = start + count == length < self.limit[slot]
            self._set_sampling(slot, requests.sampling, row)
        for of_row in in_window:
            # all pieces are written before one is read
            self._check_window(*of_row)
        scores = None if next_BT is None else self._scores(next_BT)
        return PrefillOutput(is_clean_B, None, scores)

    def _decode(self, is_live_B, pages):
        page_BN = pages.page_BN
        grid = self.grid
        assert page_BN.shape == (grid.decode_slots, grid.num_pages(grid.max_length))
        tokens_BQ = np.full((grid.decode_slots, grid.steps_per_call), NO_TOKEN)
        is_finite_B = np.ones(grid.decode_slots, bool)
        for slot in np.flatnonzero(is_live_B):
            assert self.is_active[slot]
            for step in range(grid.steps_per_call):
                tokens = self.tokens[slot]
                is_finite_B[slot] = NOT_FINITE not in tokens
                if is_finite_B[slot]:
                    assert self._read(page_BN[slot], len(tokens)) == tokens
                    new = next_token(tokens, self.key[slot], self.sample[slot])
                    self._write(slot, page_BN[slot], len(tokens), [new])
                    tokens.append(new)
                    self._check_window(slot, len(tokens), tokens)
                    tokens_BQ[slot, step] = new
                ends = tokens[-1] in self.stop_ids[slot] or len(tokens) == self.limit[slot]
                if ends or not is_finite_B[slot]:
                    self.is_active[slot] = False
                    break
        is_clean_B, scores = np.ones(grid.decode_slots, bool), self._scores(tokens_BQ)
        return DecodeOutput(tokens_BQ, self.is_active.copy(), is_finite_B, is_clean_B, scores)

    def _read(self, page_N, length) -> list[int]:
        assert (page_N[: self.grid.num_pages(length)] < self.grid.pages).all()
        entries = self.entries[page_N[page_N < self.grid.pages]].ravel()
        context = entries[:length].tolist()
        # non-finite numbers after the context would spoil the sums of attention
        assert NOT_FINITE in context or NOT_FINITE not in entries
        return context

    def _write(self, slot, page_N, start, tokens):
        own = self.own[slot]
        for position, token in enumerate(tokens, start):
            page, entry = divmod(position, self.grid.page)
            self.entries[page_N[page], entry] = token
            if len(own):
                own[page % len(own), entry] = token

    def _check_window(self, slot, first_length, tokens):
        """Check that a slot has the windows of the tokens from one on, whose lengths are given."""
        if not len(own := self.own[slot]):
            return
        page, first, end = self.grid.page, max(0, first_length - WINDOW), len(tokens)
        seen = [own[n // page % len(own), n % page] for n in range(first, end)]
        assert seen == tokens[first:]
        pages = own[np.arange(first // page, -(-end // page)) % len(own)]
        assert NOT_FINITE in tokens or NOT_FINITE not in pages

    def _scores(self, ids):
        ids = np.asarray(ids)
        empty = np.zeros((*ids.shape, 1), np.int64)
        return TokenScores(-ids / VOCAB, empty, empty.astype(float))


class Letters:
    """A tokenizer with one of eight letters for each token."""

    special_ids = frozenset({EOS_ID})
    strips_leading_space = False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([ord("a") + token_id % 8])


def session(grid: BucketGrid) -> GenerationSession:
    """Return a session on a device of tokens."""
    admission = Admission(grid, VOCAB, grid.max_length, (EOS_ID,), Letters())
    return GenerationSession(
        runner=PagedDevice(grid),
        slots=SlotCalls(grid, VOCAB),
        admission=admission,
    )
