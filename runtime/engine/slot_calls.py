"""Packs the scheduler's actions into calls of graphs, and reads their outputs, in token ids.

It is the part of token generation between the scheduler and the device: it knows the requests in
the slots. Does not know about text, files or stop strings, nor about devices. Only ids, flags,
expert counts and, if requested, log-probabilities are copied to the host after a call. A sequence
that gave its slot back emits its tokens again, which are left out. Guarantees: a sequence with
non-finite logits ends without effect on the others; each token of a sequence is in one event.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ...compile.graphs.graph_kinds import DECODE, FORK, GraphKey
from ...compile.graphs.signatures import greedy_sampling
from ...compile.grids.bucket_grid import BucketGrid
from ...modelzoo.attention.shared_pages import SlotPages
from ...modelzoo.sampling import SamplingState
from ...modelzoo.structure import StructureTables
from .actions import (
    Action,
    DecodeAction,
    ForkAction,
    PrefillAction,
    PromptPiece,
    ScheduledSequence,
)
from .admission import AdmittedRequest
from .call_results import CallResults, Event
from .metrics import EngineMetrics
from .model_runner import GraphCall
from .padding import pack_pieces, pack_requests, pack_sampling, pack_shared
from .page_pool import CopiedPage
from .prompt_scores import PromptScores, num_alternatives
from .scheduler import Scheduler


class SlotCalls:
    """The requests in the slots, and the calls of graphs that serve them.

    Args:
      grid: The buckets, slots and pages of the plan.
      padded_vocab: The vocabulary size of the logits, padding included.
      structures: The automata of the plan on the devices; None in a plan without them.
    """

    def __init__(
        self, grid: BucketGrid, padded_vocab: int, structures: StructureTables | None = None
    ):
        self.scheduler = Scheduler(grid)
        self._grid, self._padded_vocab, self._structures = grid, padded_vocab, structures
        self._requests: dict[int, AdmittedRequest] = {}
        self._sampling: dict[int, SamplingState] = {}
        """Sampling parameters of each request, for its first sample."""
        self.in_slot: dict[int, ScheduledSequence] = {}
        """The sequences that decode, by slot."""
        self._scores = PromptScores()
        self._unclean: set[int] = set()
        """Slots whose cache may hold non-finite numbers."""
        self._pool = self.scheduler.slots.pool
        self._num_known: dict[int, int] = {}
        """The tokens that replays in slots still have to emit again."""
        self._prefilled_page_BN: np.ndarray | None = None
        """The pages of the rows of the last prefill call; None without pages."""

    def submit(self, request: AdmittedRequest) -> None:
        """Queue a request.

        Raises:
          NoBucketFits: The request does not fit the grid.
        """
        self.scheduler.submit(request.scheduled)
        self._requests[request.scheduled.number] = request
        # packed here, because requests are submitted while the device runs
        self._sampling[request.scheduled.number] = pack_sampling(
            request.request.params,
            ScheduledSequence(request.scheduled, sample=0),
            seed=request.seed,
            stop_ids=request.stop_ids,
            vocab_size=self._padded_vocab,
            structure=request.structure,
            adapter=request.adapter,
        )

    def forget(self, number: int) -> None:
        """Drop the data of a request whose sequences have all ended."""
        del self._requests[number], self._sampling[number]

    def release(self, slot: int) -> None:
        """Free a slot whose sequence ended, on the device or at a stop string."""
        self.scheduler.slots.release(slot)
        self._leave(slot)

    def _leave(self, slot: int) -> None:
        """Record that no sequence decodes in a slot any more."""
        del self.in_slot[slot]
        self._num_known.pop(slot, None)

    def emptied(self) -> "SlotCalls":
        """The calls of the same plan, without requests."""
        return SlotCalls(self._grid, self._padded_vocab, self._structures)

    def pack(self, action: Action) -> Sequence[GraphCall]:
        """The calls that carry out an action; the last one has its output."""
        match action:
            case PrefillAction():
                return self._prefill(action)
            case ForkAction():
                return [self._fork(action)]
            case DecodeAction():
                return self._decode(action)

    def fetched(self, action: Action, output: Any) -> Any:
        """The part of a call's output to copy to the host.

        Log-probabilities of new tokens are included only if a request in a slot asks for them.
        """
        if not isinstance(action, DecodeAction):
            return output
        in_slots = (self.in_slot[slot].request.number for slot in action.slots)
        if any(self._requests[number].request.params.logprobs is not None for number in in_slots):
            return output
        return output._replace(scores=None)

    def read(self, results: CallResults) -> None:
        """Read what the next action depends on: which sequences ended, and their lengths."""
        results.sequences = dict(self.in_slot)
        output = results.output
        match results.action:
            case PrefillAction(rows=rows):
                for i, row in enumerate(rows):
                    self._note_contents(i, row, is_clean=bool(output.is_clean_B[i]))
            case DecodeAction(slots=slots):
                self._leave_out_known(results)
                self._note_lengths(slots, results)

    def events(self, results: CallResults, metrics: EngineMetrics) -> list[Event]:
        """The events of a call, which is counted: pass each call once, in order."""
        if results.output is not None and (experts := results.output.experts) is not None:
            phase = "decode" if isinstance(results.action, DecodeAction) else "prefill"
            metrics.experts[phase].add(experts.use)
        match results.action:
            case PrefillAction() as action:
                metrics.count_prompts(action, results.seconds)
                return self._events_of_prefill(action, results)
            case ForkAction(num_copied=num_copied):
                metrics.count_fork(num_copied, results.seconds)
            case DecodeAction() as action:
                num_known = sum(results.num_known.values())
                metrics.count_decode(
                    # the device's loop ends early when no sequence emits any more
                    steps=int(results.num_emitted_B.max()),
                    emitted=int(results.num_emitted_B.sum()) - num_known,
                    live_slots=len(action.slots),
                    slots=len(results.num_emitted_B),
                    seconds=results.seconds,
                    read=results.read,
                )
                metrics.count_waits(action.num_waiting, num_known)
                return self._events_of_decode(action, results)
        return []

    def _prefill(self, action: PrefillAction) -> list[GraphCall]:
        grid, bucket, rows = self._grid, action.bucket, action.rows
        calls = self._clear_pages() + [
            # the attention of the next owner would multiply non-finite numbers by zero, which gives
            # NaN; a fork from a source beyond the last slot writes an empty slot
            self._copy(grid.decode_slots, row.slot, None)
            for row in rows
            if row.start == 0 and row.slot is not None and row.slot in self._unclean
        ]
        requests = [self._requests[row.sequence.request.number] for row in rows]
        prompts = [request.request.prompt_token_ids for request in requests]
        if grid.pages is not None:
            slots = [row.slot for row in rows] + [None] * (bucket.batch - len(rows))
            page_BN = self._pool.rows(slots, grid.num_pages(bucket.length))
            self._prefilled_page_BN = page_BN
        pieces, tokens_BT, next_BT = pack_pieces(
            rows, prompts, bucket, grid.decode_slots, self._prefilled_page_BN
        )
        slot_requests = pack_requests(
            [row.sequence.request for row in rows],
            [self._sampling_of(row.sequence) for row in rows],
            bucket.batch,
        )
        arguments = (pieces, slot_requests, tokens_BT)
        if action.is_scored:
            # -1 for dummy rows
            num_logprobs_B = np.full(bucket.batch, -1, np.int32)
            num_logprobs_B[: len(rows)] = [num_alternatives(x.request) for x in requests]
            arguments = (*arguments, next_BT, num_logprobs_B)
        kind = "score" if action.is_scored else "prefill"
        return [*calls, GraphCall(GraphKey(kind, bucket), arguments)]

    def _events_of_prefill(self, action: PrefillAction, results: CallResults) -> list[Event]:
        rows, output = action.rows, results.output
        events: list[Event] = []
        if action.is_scored:
            events += self._scores.add(rows, output.scores, self._requests)
        if output.experts is not None:
            sequences = [(i, row.sequence) for i, row in enumerate(rows) if row.num_known is None]
            events += results.dropped(sequences, is_of_prompt=True)
        return events

    def _note_contents(self, index: int, row: PromptPiece, *, is_clean: bool) -> None:
        """Record the contents of a slot after a piece was written to it, if the row has a slot."""
        if (slot := row.slot) is None:
            return
        if not is_clean:
            self._unclean.add(slot)
            if self._prefilled_page_BN is not None:
                self._pool.mark_unclean(self._prefilled_page_BN[index])
        if row.is_last and row.sequence.request.generates:
            self.in_slot[slot] = row.sequence
            if row.num_known:
                self._num_known[slot] = row.num_known

    def _sampling_of(self, sequence: ScheduledSequence) -> SamplingState:
        sampling = self._sampling[sequence.request.number]
        return sampling._replace(sample_B=np.array([sequence.sample], np.int32))

    def _fork(self, action: ForkAction) -> GraphCall:
        call = self._copy(action.source, action.slot, action.sequence, action.copied_pages)
        if action.sequence is not None:
            self.in_slot[action.slot] = action.sequence
        if action.source in self._unclean:
            self._unclean.add(action.slot)
            # a slot that was drained before the copy has no pages any more
            copied = [page for _, page in action.copied_pages]
            self._pool.mark_unclean(np.append(self._pool.table[action.slot], copied))
        return call

    def _clear_pages(self) -> list[GraphCall]:
        """The calls that clear unclean pages before the next call of another graph."""
        no_slot, none = self._grid.decode_slots, self._pool.no_page
        pages = [CopiedPage(none, page) for page in self._pool.pages_to_clear()]
        size = self._pool.table.shape[1]
        return [
            self._copy(no_slot, no_slot, None, pages[first : first + size])
            for first in range(0, len(pages), size)
        ]

    def _copy(
        self,
        source: int,
        slot: int,
        sequence: ScheduledSequence | None,
        copied_pages: Sequence[CopiedPage] = (),
    ) -> GraphCall:
        """Copy a slot, with the sampling parameters of a sequence if it has one.

        The given pages are copied too, at most as many as a row may have.
        """
        sampling = greedy_sampling(1, self._padded_vocab, self._grid, np)
        if sequence is not None:
            sampling = self._sampling_of(sequence)
        self._unclean.discard(slot)
        pages_N2 = np.full((self._pool.table.shape[1], 2), self._pool.no_page, np.int32)
        if copied_pages:
            pages_N2[: len(copied_pages)] = copied_pages
        slots = np.int32(source), np.int32(slot)
        return GraphCall(FORK, (*slots, sampling, pages_N2[:, 0], pages_N2[:, 1]))

    def _decode(self, action: DecodeAction) -> list[GraphCall]:
        for slot in action.given_back:
            self._leave(slot)
        is_live_B = np.zeros(self._grid.decode_slots, bool)
        is_live_B[list(action.slots)] = True
        tables = () if self._structures is None else (self._structures,)
        pool = self._pool
        page_BN = np.where(is_live_B[:, None], pool.table, pool.no_page)
        shared = pack_shared(action.groups, pool.table, self._grid)
        arguments = is_live_B, SlotPages._make((page_BN, shared))
        decode = GraphCall(DECODE, arguments, tables)
        return [*self._clear_pages(), decode]

    def _leave_out_known(self, results: CallResults) -> None:
        """Record how many tokens of a decode call replays had emitted before."""
        known = {
            slot: min(self._num_known[slot], int(results.num_emitted_B[slot]))
            for slot in results.action.slots
            if slot in self._num_known
        }
        results.num_known = known
        for slot, count in known.items():
            self._num_known[slot] -= count
            if not self._num_known[slot]:
                del self._num_known[slot]

    def _note_lengths(self, slots: tuple[int, ...], results: CallResults) -> None:
        """Record the new lengths after a decode call, and free the slots of ended sequences."""
        output, num_emitted = results.output, results.num_emitted_B.tolist()
        is_active, is_clean = output.is_active_B.tolist(), output.is_clean_B.tolist()
        unclean = [slot for slot in slots if not is_clean[slot]]
        self._unclean.update(unclean)
        self._pool.mark_unclean(self._pool.table[unclean].ravel())
        slots_B = np.array(slots)
        emitted_B = results.num_emitted_B[slots_B]
        results.read = self.scheduler.slots.read_entries(slots_B, emitted_B, results.action.groups)
        for slot in slots:
            self.scheduler.slots.advance(slot, num_emitted[slot])
            if not is_active[slot]:
                self.release(slot)

    def _events_of_decode(self, action: DecodeAction, results: CallResults) -> list[Event]:
        events: list[Event] = []
        if results.output.experts is not None:
            new = [
                entry for entry in results.sequences.items() if entry[0] not in results.num_known
            ]
            events += results.dropped(new, is_of_prompt=False)
        for slot in action.slots:
            if results.is_known(slot):
                continue
            request = self._requests[results.sequences[slot].request.number].request
            events.append(results.emitted(slot, request.params.logprobs))
        return events
