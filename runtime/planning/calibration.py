"""Time the graphs of a model on a present target, so that predictions for the target are right.

Rows of random token ids run through the engine, a few calls of each shape. The time of a call
begins when the scheduler chooses it and ends when the slots of finished rows are free. Does not
know about files.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.prefill_bucket import PrefillBucket
from ...compile.hardware.hardware import Hardware
from ...compile.plan import Numbers, Plan, PlannedModel
from ...compile.planning.cost import Calibration, CallTiming, calibrate
from ...compile.planning.work import Work
from ...sharding.call import Call
from ..console import plural
from ..devices.machine import describe_machine
from ..engine.actions import DecodeAction, PrefillAction
from ..request import Request, SamplingParams
from ..session import LoadedModel, Session, start

SHORT_PROMPT = 16
SHORTEST_SPAN = 128
STEPS_PER_CALL = 8
CALLS_PER_SHAPE = 4


class Trial(NamedTuple):
    """The sizes of one grid whose graphs are timed."""

    slots: int
    tokens_per_prefill: int
    chunk: int | None = None


TRIALS = (
    Trial(4, 128),
    Trial(16, 256),
    Trial(32, 512),
    Trial(64, 512),
    Trial(32, 256, chunk=8),
    Trial(8, 128, chunk=32),
    Trial(8, 512, chunk=128),
)


def measure(
    model: LoadedModel,
    hardware: Hardware,
    max_row_length: int,
    layout: str = "",
    on_trial: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.perf_counter,
    trials: Sequence[Trial] = TRIALS,
) -> Calibration:
    """Time graphs for rows of up to `max_row_length` positions, and fit the cost model to them.

    Both whole prompts and chunks are timed.

    Args:
      layout: The spelling of the model's layout, which the calibration records.
      on_trial: Receives one line of progress after each trial.

    Raises:
      ValueError: `max_row_length` is too short for the timed calls.
    """
    min_length = SHORT_PROMPT + STEPS_PER_CALL * CALLS_PER_SHAPE
    if max_row_length < min_length:
        raise ValueError(
            f"calibration: expected rows of at least {min_length} positions, got {max_row_length}."
        )
    placement = model.placement
    cache_dtype = placement.cache_dtype(model.dtype)
    work = Work(model.definition, model.dtype, placement.layout, cache_dtype)
    seconds: dict[Call, list[float]] = defaultdict(list)
    for trial in trials:
        grid = _grid(trial, max_row_length)
        planned = PlannedModel(model.files.name, model.files.fingerprint())
        numbers = Numbers(model.dtype)
        plan = Plan(model.target.name, planned, numbers, grid, model.placement.layout)
        generator = start(model, plan)
        for span in grid.graph_spans:
            _submit(generator, grid, span, model.definition.config.vocab_size)
            _run(generator, grid, seconds, clock)
        kind = "whole prompts" if trial.chunk is None else f"chunks of {trial.chunk}"
        on_trial(f"calibration: {kind}, {plural(trial.slots, 'slot')} timed")
    measured = [_measured(call, times) for call, times in seconds.items() if len(times) > 1]
    return calibrate(
        work,
        hardware,
        measured,
        model=model.files.fingerprint(),
        layout=layout,
        machine=describe_machine(),
    )


def _measured(call: Call, seconds: list[float]) -> CallTiming:
    first, *others = seconds
    usual = statistics.median(others)
    steps = STEPS_PER_CALL if call.phase == "decode" else 1
    return CallTiming(call, usual / steps, first - usual)


def _grid(trial: Trial, max_row_length: int) -> BucketGrid:
    """The grid of a trial: spans up to the longest row, and prefill of rows that fill them."""
    if trial.chunk is not None:
        # a chunk of at most half the longest row: then whole chunks can hold the rows of _submit
        return _chunk_grid(trial, min(trial.chunk, max_row_length // 2), max_row_length)
    spans = sorted(
        {min(max_row_length, span) for span in (SHORTEST_SPAN, max_row_length // 2, max_row_length)}
    )
    lengths = sorted({SHORT_PROMPT, *map(_long_prompt, spans)})
    prefill = [
        PrefillBucket(length, max(1, min(trial.tokens_per_prefill // length, trial.slots)))
        for length in lengths
    ]
    return BucketGrid(max_row_length, tuple(prefill), trial.slots, tuple(spans), STEPS_PER_CALL)


def _chunk_grid(trial: Trial, chunk: int, max_row_length: int) -> BucketGrid:
    """The grid of a trial with chunks: spans of whole chunks, at most `max_row_length` long."""
    spans = sorted(
        {max(1, span // chunk) * chunk for span in (1, max_row_length // 2, max_row_length)}
    )
    batch = min(trial.tokens_per_prefill // chunk, trial.slots)
    prefill = tuple(PrefillBucket(span, batch, chunk) for span in spans)
    return BucketGrid(spans[-1], prefill, trial.slots, tuple(spans), STEPS_PER_CALL)


def _long_prompt(span: int) -> int:
    """The prompt length of a row whose last decode call reaches the end of a span."""
    return max(SHORT_PROMPT, span - STEPS_PER_CALL * CALLS_PER_SHAPE)


def _submit(generator: Session, grid: BucketGrid, span: int, vocab_size: int) -> None:
    """Submit a full batch with some rows that are long enough to need the span.

    With chunks all rows are long, so that the prefill batches are full.
    """
    rng = np.random.default_rng(0)
    length = _long_prompt(span)
    num_long = grid.decode_slots
    if not grid.chunks:
        num_long = min(CALLS_PER_SHAPE * grid.bucket_of(length).batch, num_long)
    lengths = [length] * num_long + [SHORT_PROMPT] * (grid.decode_slots - num_long)
    params = SamplingParams(
        temperature=0, max_tokens=STEPS_PER_CALL * CALLS_PER_SHAPE, ignore_eos=True
    )
    for row, prompt_length in enumerate(lengths):
        prompt = rng.integers(0, vocab_size, prompt_length).tolist()
        generator.submit(Request(str(row), prompt, params))


def _run(
    generator: Session,
    grid: BucketGrid,
    seconds: dict[Call, list[float]],
    clock: Callable[[], float],
) -> None:
    """Run and time the submitted rows; they decode together, so each decode call runs all steps."""
    while generator.unfinished:
        started = clock()
        action = generator.dispatch()
        generator.receive()
        taken = clock() - started
        generator.collect()
        match action:
            case PrefillAction(bucket=bucket):
                seconds[bucket.call()].append(taken)
            case DecodeAction(span=span):
                seconds[grid.decode_call(span)].append(taken)
