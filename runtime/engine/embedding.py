"""Runs embedding requests in batches of texts of similar length.

It has the interface of a generation session, so the batch job and a pod drive both in the same way.
Each text waits in the queue of its bucket. A full batch runs at once; what is left in the queues
runs when no more requests come. A request ends when all of its texts have vectors. Knows nothing of
files, tokenizers or pooling. Guarantees: the bucket of a text follows from its length and the plan
alone; every submitted request is returned exactly once; a text that fits no bucket is refused by
name and never truncated.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np

from ...compile.compiled_graphs import CompiledGraphs
from ...compile.graph_failures import naming_graph
from ...compile.graphs.embed_step import EmbedOutput
from ...compile.graphs.graph_kinds import GraphKey
from ...compile.grids.bucket_grid import BucketGrid, NoBucketFits
from ...compile.grids.prefill_bucket import PrefillBucket
from ...compile.monitor import compile_monitor
from ..devices.host_arrays import HostArrays
from ..embedding.texts import EncodedText, unpack
from ..errors import RowError, check_process
from ..request import Request, RequestMetrics, RequestOutput
from .metrics import EngineMetrics, PrefillUse, RunFigures
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


class _InFlight(NamedTuple):
    bucket: PrefillBucket
    rows: list[_WaitingText]
    output: EmbedOutput
    start: float


@dataclass
class EmbeddingSession:
    """Submits requests to embedding graphs and returns outputs as they finish.

    Attributes:
      graphs: The compiled graphs.
      parameters: The arrays of the model.
      host: Transfers to and from the devices.
      vocab_size: The number of token ids of the model, without padding.
      max_position: The number of positions of the model.
      attention: The attention kernel with the reason for the choice, for the report.
      clock: Monotonic seconds.
    """

    graphs: CompiledGraphs
    parameters: Mapping[str, jax.Array]
    host: HostArrays
    vocab_size: int
    max_position: int
    attention: Mapping[str, str] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    metrics: EngineMetrics = field(default_factory=EngineMetrics)

    def __post_init__(self):
        self._open: dict[int, _OpenRequest] = {}
        self._num_submitted = 0
        self._in_flight: _InFlight | None = None
        self._finished: list[RequestOutput] = []
        self._queues: dict[PrefillBucket, deque[_WaitingText]] = {
            bucket: deque() for bucket in self.grid.prefill
        }
        self._compiles_at_start = compile_monitor().num_compiles

    @property
    def grid(self) -> BucketGrid:
        """The plan's buckets, which texts must fit."""
        return self.graphs.grid

    @property
    def unfinished(self) -> int:
        """The number of requests that were submitted and not yet returned."""
        return len(self._open) + len(self._finished)

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
            bucket = self.grid.bucket_of(len(text.ids))
            self._queues[bucket].append(_WaitingText(number, index))

    def receive(self) -> bytes:
        """Wait for the call in flight, and keep its vectors.

        Returns:
          The vectors as bytes, which must be equal on all processes of a pod.
        """
        if (call := self._in_flight) is None:
            return b""
        with naming_graph(GraphKey("embed", call.bucket), self.grid, "failed as it ran"):
            output = self.host.fetch(call.output)
        self._in_flight = None
        self._count(call, output, self.clock() - call.start)
        for row, text in enumerate(call.rows):
            entry = self._open[text.number]
            entry.vectors[text.place] = output.vectors_BD[row]
            entry.is_finite &= bool(output.is_finite_B[row])
            if all(vector is not None for vector in entry.vectors):
                self._finished.append(self._finish(self._open.pop(text.number)))
        return output.vectors_BD.tobytes()

    def dispatch(self) -> PrefillBucket | None:
        """Start the next call; the previous one must have been received.

        Returns:
          The bucket of the call; None if no text waits.
        """
        check_process()
        assert self._in_flight is None
        waiting = [bucket for bucket, queue in self._queues.items() if queue]
        if not waiting:
            return None
        full = (bucket for bucket in waiting if len(self._queues[bucket]) >= bucket.batch)
        bucket = next(full, waiting[-1])
        queue = self._queues[bucket]
        rows = [queue.popleft() for _ in range(min(bucket.batch, len(queue)))]
        start = self.clock()
        arguments = self.host.put(self._pack(bucket, rows))
        key = GraphKey("embed", bucket)
        with naming_graph(key, self.grid, "failed as it ran"):
            _, output = self.graphs.call(key, self.parameters, None, *arguments)
        self._in_flight = _InFlight(bucket, rows, output, start)
        return bucket

    def collect(self) -> list[RequestOutput]:
        """Return the requests that ended in the calls received since the last `collect`."""
        finished, self._finished = self._finished, []
        return finished

    def run(self) -> list[RequestOutput]:
        """Step until every submitted request has ended; return all outputs."""
        outputs: list[RequestOutput] = []
        while self.unfinished:
            self.receive()
            self.dispatch()
            outputs += self.collect()
        return outputs

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

    def restarted(self, run_seed: int) -> "EmbeddingSession":
        """A session for the next rows, with counters of its own; no row may be open."""
        del run_seed
        assert not self._open
        return replace(self, metrics=EngineMetrics())

    def abandon(self) -> None:
        """Drop every request; valid after an interrupted step too."""
        self._open.clear()
        self._finished.clear()
        self._in_flight = None
        for queue in self._queues.values():
            queue.clear()

    def statistics(self) -> dict[str, Any]:
        """The counters of the run so far, as a dict that can be written as JSON."""
        return {
            **self.metrics.report(),
            "attention": dict(self.attention),
            "compiles_during_run": compile_monitor().num_compiles - self._compiles_at_start,
        }

    def _check_text(self, name: str, text: EncodedText, request: Request) -> None:
        if not text.ids:
            raise RowError("empty_prompt", f"{name}: expected at least one token, got none.", name)
        for token in text.ids:
            if not 0 <= token < self.vocab_size:
                raise RowError(
                    "invalid_token_id",
                    f"{name}: expected ids from 0 to {self.vocab_size - 1}, got {token}.",
                    name,
                )
        length = len(text.ids)
        try:
            if length > self.max_position:
                raise NoBucketFits(
                    f"a text of {length} tokens needs as many positions; the model has "
                    f"{self.max_position}. Shorten or split the text."
                )
            self.grid.fit(length, 0)
        except NoBucketFits as error:
            message = f"request {request.request_id!r}: {name}: {error}"
            raise RowError("context_length_exceeded", message, name) from None

    def _pack(
        self, bucket: PrefillBucket, rows: Sequence[_WaitingText]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The arguments `tokens_BT, count_B, first_B`; dummy rows have no tokens."""
        tokens_BT = np.zeros((bucket.batch, bucket.tokens), np.int32)
        count_B, first_B = np.zeros((2, bucket.batch), np.int32)
        for row, waiting in enumerate(rows):
            entry = self._open[waiting.number]
            entry.has_started = True
            text = entry.texts[waiting.place]
            tokens_BT[row, : len(text.ids)] = text.ids
            count_B[row], first_B[row] = len(text.ids), text.num_first
        return tokens_BT, count_B, first_B

    def _count(self, call: _InFlight, output: EmbedOutput, seconds: float) -> None:
        texts = [self._open[row.number].texts[row.place] for row in call.rows]
        if output.experts is not None:
            self.metrics.experts["prefill"].add(output.experts.use)
        real, computed = (
            sum(len(text.ids) for text in texts),
            call.bucket.batch * call.bucket.tokens,
        )
        self.metrics.count_prefill(
            call.bucket, PrefillUse(1, len(call.rows), real, computed, seconds)
        )

    def _finish(self, entry: _OpenRequest) -> RequestOutput:
        request = entry.request
        output = RequestOutput(
            request.request_id,
            request.prompt,
            list(request.prompt_token_ids),
            metrics=RequestMetrics(entry.arrival, None, self.clock()),
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
