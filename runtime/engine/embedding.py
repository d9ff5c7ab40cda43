"""Runs embedding requests in batches of texts of similar length.

Each text waits in the queue of its bucket. A full batch runs at once; what is left in the queues
runs when no more requests come. A request ends when all of its texts have vectors. Knows nothing of
files, tokenizers or pooling. Guarantees: the bucket of a text follows from its length and the plan
alone; every submitted request is returned exactly once; a text that fits no bucket is refused by
name and never truncated.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...compile.graphs.graph_kinds import GraphKey
from ...compile.grids.bucket_grid import NoBucketFits
from ...compile.grids.prefill_bucket import PrefillBucket
from ..embedding.texts import EncodedText, unpack
from ..errors import RowError, check_process
from ..request import Request, RequestMetrics, RequestOutput
from .admission import check_ids, check_text
from .call_results import CallResults
from .engine import Engine
from .metrics import PrefillUse, RunFigures, prefill_name
from .model_runner import GraphCall
from .shared_prefixes import SharedPrefix


@dataclass
class _OpenRequest:
    """A request whose texts do not all have vectors."""

    request: Request
    arrival: float
    texts: list[EncodedText]
    vectors: list[np.ndarray | None]
    has_started: bool = False
    is_finite: bool = True


class _WaitingText(NamedTuple):
    number: int
    """The number of the request."""
    place: int
    """The index of the text in the request."""


class EmbedAction(NamedTuple):
    """Run one batch of texts."""

    bucket: PrefillBucket
    rows: list[_WaitingText]


@dataclass(kw_only=True)
class EmbeddingSession(Engine[EmbedAction, _OpenRequest]):
    """Submits requests to embedding graphs and returns outputs as they finish.

    Attributes:
      vocab_size: The number of token ids of the model, without padding.
      max_position: The number of positions of the model.
      other_tokens: Ids that stand for images, videos or sounds, by their keys in config.json.
    """

    vocab_size: int
    max_position: int
    other_tokens: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        self._queues: dict[PrefillBucket, deque[_WaitingText]] = {
            bucket: deque() for bucket in self.runner.grid.prefill
        }

    @property
    def wants_more(self) -> bool:
        """Whether another request should be submitted before the next step."""
        return not any(len(queue) >= bucket.batch for bucket, queue in self._queues.items())

    @property
    def figures(self) -> RunFigures:
        """The figures of the run so far, for the progress line."""
        return RunFigures(0, 0, 0, self.metrics.padding_waste)

    def reserve(self, num_slots: int) -> None:
        """Do nothing: there are no slots."""

    def check(self, request: Request) -> list[EncodedText]:
        """Return the texts of a request that the plan can serve.

        Raises:
          RowError: A text has no tokens, an unknown token, or too many tokens.
        """
        texts = unpack(request.prompt_token_ids)
        own = [f"input[{index}]" for index in range(len(texts))] if len(texts) > 1 else ["input"]
        for name, text in zip(request.places or own, texts, strict=True):
            self._check_text(name, text, request)
        return texts

    def submit(self, request: Request, prefix: SharedPrefix | None = None) -> None:
        """Queue the texts of a request. `prefix` is always None, as texts share no prefixes.

        Raises:
          RowError: The plan or the model cannot serve the request.
        """
        del prefix
        check_process()
        texts = self.check(request)
        number = self._num_submitted
        self._num_submitted += 1
        vectors: list[np.ndarray | None] = [None] * len(texts)
        self._open[number] = _OpenRequest(request, self.clock(), texts, vectors)
        for index, text in enumerate(texts):
            bucket = self.runner.grid.bucket_of(len(text.ids))
            self._queues[bucket].append(_WaitingText(number, index))

    def next_action(self) -> EmbedAction | None:
        """The batch to run next: a full one, else one of the last bucket in which a text waits."""
        waiting = [bucket for bucket, queue in self._queues.items() if queue]
        if not waiting:
            return None
        full = (bucket for bucket in waiting if len(self._queues[bucket]) >= bucket.batch)
        bucket = next(full, waiting[-1])
        queue = self._queues[bucket]
        rows = [queue.popleft() for _ in range(min(bucket.batch, len(queue)))]
        return EmbedAction(bucket, rows)

    def pack(self, action: EmbedAction) -> list[GraphCall]:
        """The call of a batch: `tokens_BT, count_B, first_B`; dummy rows have no tokens."""
        bucket, rows = action
        tokens_BT = np.zeros((bucket.batch, bucket.tokens), np.int32)
        count_B, first_B = np.zeros((2, bucket.batch), np.int32)
        for row, waiting in enumerate(rows):
            entry = self._open[waiting.number]
            entry.has_started = True
            text = entry.texts[waiting.place]
            tokens_BT[row, : len(text.ids)] = text.ids
            count_B[row], first_B[row] = len(text.ids), text.num_first
        return [GraphCall(GraphKey("embed", bucket), (tokens_BT, count_B, first_B))]

    def read(self, results: CallResults) -> bytes:
        """The vectors as bytes, which must be equal on all processes of a pod."""
        return results.output.vectors_BD.tobytes()

    def finish(self, received: Sequence[CallResults]) -> list[RequestOutput]:
        """Count calls, keep their vectors, and return the requests that have all of theirs."""
        finished = []
        for results in received:
            self._count(results)
            for row, text in enumerate(results.action.rows):
                entry = self._open[text.number]
                entry.vectors[text.place] = results.output.vectors_BD[row]
                entry.is_finite &= bool(results.output.is_finite_B[row])
                if all(vector is not None for vector in entry.vectors):
                    finished.append(self._finish(self._open.pop(text.number), results.ended))
        return finished

    def drain(self) -> list[str]:
        """Drop requests of which no text has run.

        Returns:
          The ids of the dropped requests, which will not be returned.
        """
        dropped = [number for number, entry in self._open.items() if not entry.has_started]
        for bucket, queue in self._queues.items():
            kept = deque(text for text in queue if self._open[text.number].has_started)
            self._queues[bucket] = kept
        return [self._open.pop(number).request.request_id for number in dropped]

    def abandon(self) -> None:
        """Drop every request; valid after an interrupted step too."""
        for queue in self._queues.values():
            queue.clear()
        super().abandon()

    def _check_text(self, name: str, text: EncodedText, request: Request) -> None:
        if not text.ids:
            raise RowError("empty_prompt", f"{name}: expected at least one token, got none.", name)
        check_ids(name, text.ids, self.vocab_size)
        check_text(name, text.ids, self.other_tokens)
        length = len(text.ids)
        try:
            if length > self.max_position:
                raise NoBucketFits(
                    f"a text of {length} tokens needs as many positions; the model has "
                    f"{self.max_position}. Shorten or split the text."
                )
            self.runner.grid.fit(length, 0)
        except NoBucketFits as error:
            message = f"request {request.request_id!r}: {name}: {error}"
            raise RowError("context_length_exceeded", message, name) from None

    def _count(self, results: CallResults) -> None:
        bucket, rows = results.action
        if results.output.experts is not None:
            self.metrics.experts["prefill"].add(results.output.experts.use)
        num_tokens = sum(len(self._open[row.number].texts[row.place].ids) for row in rows)
        num_computed = bucket.batch * bucket.tokens
        use = PrefillUse(1, len(rows), num_tokens, num_computed, results.seconds)
        self.metrics.count_prefill(prefill_name(bucket, is_scored=False), use)

    def _finish(self, entry: _OpenRequest, now: float) -> RequestOutput:
        request = entry.request
        output = RequestOutput(
            request.request_id,
            request.prompt,
            list(request.prompt_token_ids),
            metrics=RequestMetrics(entry.arrival, None, now),
        )
        if entry.is_finite:
            output.vectors = np.stack([vector for vector in entry.vectors if vector is not None])
        else:
            output.error = RowError(
                "nonfinite_logits",
                f"request {request.request_id!r}: expected finite vectors, got NaN or infinite "
                f"numbers. Other rows are not affected. Use --dtype float32; if the error stays, "
                f"the weights are at fault.",
            )
        return output
