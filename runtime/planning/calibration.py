"""Timing the graphs of a model on a target that is there, so that predictions of it hold.

Rows of random ids run through the engine, a few calls of each shape; what a call takes is from its
choice to the freeing of the slots of rows that it ended. Knows nothing of files.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...compile.grids.bucket_grid import BucketGrid, PrefillBucket
from ...compile.plan import Numbers, Plan, PlannedModel
from ...compile.planning.cost import Calibration, CallTiming, calibrate
from ...compile.planning.hardware import Hardware
from ...compile.planning.work import Work
from ...sharding.call import Call
from ..console import plural
from ..devices.machine import describe_machine
from ..engine.decode_slots import DecodeAction
from ..engine.generation import GenerationSession
from ..engine.scheduler import PrefillAction
from ..request import Request, SamplingParams
from ..session import LoadedModel, start

SHORT_PROMPT = 16
SHORTEST_SPAN = 128
STEPS_PER_CALL = 8
CALLS = 4
"""Of a shape."""


class Trial(NamedTuple):
    """The shapes that are timed together, as one grid."""

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
    longest: int,
    layout: str = "",
    on_trial: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.perf_counter,
    trials: Sequence[Trial] = TRIALS,
) -> Calibration:
    """Time graphs of rows of up to `longest` positions, with chunks and without; fit the model."""
    least = SHORT_PROMPT + STEPS_PER_CALL * CALLS
    if longest < least:
        raise ValueError(
            f"calibration: expected rows of at least {least} positions, got {longest}."
        )
    placement = model.placement
    cache_dtype = placement.cache_dtype(model.dtype)
    work = Work(model.definition, model.dtype, placement.layout, cache_dtype)
    seconds: dict[Call, list[float]] = defaultdict(list)
    for trial in trials:
        grid = _grid(trial, longest)
        planned = PlannedModel(model.files.name, model.files.fingerprint())
        numbers = Numbers(model.dtype)
        plan = Plan(model.target.name, planned, numbers, grid, model.placement.layout)
        generator = start(model, plan)
        for span in grid.graph_spans:
            _submit(generator, grid, span)
            _run(generator, seconds, clock)
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


def _grid(trial: Trial, longest: int) -> BucketGrid:
    """Spans up to the longest row, and prefill for rows that fill each."""
    if trial.chunk is not None:
        return _chunk_grid(trial, min(trial.chunk, longest), longest)
    spans = sorted({min(longest, span) for span in (SHORTEST_SPAN, longest // 2, longest)})
    lengths = sorted({SHORT_PROMPT, *map(_long_prompt, spans)})
    prefill = [
        PrefillBucket(length, max(1, min(trial.tokens_per_prefill // length, trial.slots)))
        for length in lengths
    ]
    return BucketGrid(longest, tuple(prefill), trial.slots, tuple(spans), STEPS_PER_CALL)


def _chunk_grid(trial: Trial, chunk: int, longest: int) -> BucketGrid:
    """Spans of whole chunks, none longer than `longest`."""
    spans = sorted({max(1, span // chunk) * chunk for span in (1, longest // 2, longest)})
    batch = min(trial.tokens_per_prefill // chunk, trial.slots)
    prefill = tuple(PrefillBucket(span, batch, chunk) for span in spans)
    return BucketGrid(spans[-1], prefill, trial.slots, tuple(spans), STEPS_PER_CALL)


def _long_prompt(span: int) -> int:
    """Of a row whose last call reaches the end of a span."""
    return max(SHORT_PROMPT, span - STEPS_PER_CALL * CALLS)


def _submit(generator: GenerationSession, grid: BucketGrid, span: int) -> None:
    """A full batch, some of whose rows are long enough to decide its span.

    Where there are chunks all rows are: so many fill their batches.
    """
    rng = np.random.default_rng(0)
    length = _long_prompt(span)
    num_long = grid.decode_slots
    if not grid.chunks:
        num_long = min(CALLS * grid.bucket_of(length).batch, num_long)
    lengths = [length] * num_long + [SHORT_PROMPT] * (grid.decode_slots - num_long)
    params = SamplingParams(temperature=0, max_tokens=STEPS_PER_CALL * CALLS, ignore_eos=True)
    for row, prompt_length in enumerate(lengths):
        prompt = rng.integers(0, generator.vocab_size, prompt_length).tolist()
        generator.submit(Request(str(row), prompt, params))


def _run(
    generator: GenerationSession,
    seconds: dict[Call, list[float]],
    clock: Callable[[], float],
) -> None:
    """Run what was submitted; all rows decode together, so every decode call has all its steps."""
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
                call = generator.grid.decode_call(span)
                seconds[call].append(taken)
