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

from ...compile.attention_kernels import cache_dtype
from ...compile.grids.bucket_grid import BucketGrid
from ...compile.grids.prefill_bucket import PrefillBucket
from ...compile.hardware.hardware import Hardware
from ...compile.plan import Numbers, Plan, PlannedModel
from ...compile.planning.cost import Calibration, CallTiming, calibrate
from ...compile.planning.work import Work
from ..console import plural
from ..devices.machine import describe_machine
from ..engine.actions import DecodeAction, PrefillAction
from ..errors import UserError
from ..request import Request, SamplingParams
from ..session import LoadedModel, Session, start

SHORT_PROMPT = 16
SHORTEST_ROW = 128
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
        raise UserError(
            f"calibration: expected rows of at least {min_length} positions, got {max_row_length}."
        )
    placement = model.placement
    stored = cache_dtype(model.definition.config, placement.platform, model.dtype)
    work = Work(model.definition, model.dtype, placement.layout, stored)
    measured: list[CallTiming] = []
    for trial in trials:
        grid = _grid(trial, max_row_length)
        planned = PlannedModel(model.files.name, model.files.fingerprint())
        numbers = Numbers(model.dtype)
        plan = Plan(model.target.name, planned, numbers, grid, model.placement.layout)
        generator = start(model, plan)
        known: set[PrefillBucket | None] = set()
        for length in _row_lengths(grid.max_length):
            prompts = _prompt_lengths(grid, length)
            _submit(generator, prompts, model.definition.config.vocab_size)
            measured += _run(generator, grid, prompts, clock, known)
        kind = "whole prompts" if trial.chunk is None else f"chunks of {trial.chunk}"
        on_trial(f"calibration: {kind}, {plural(trial.slots, 'slot')} timed")
    return calibrate(
        work,
        hardware,
        measured,
        model=model.files.fingerprint(),
        layout=layout,
        machine=describe_machine(),
    )


def _row_lengths(max_length: int) -> list[int]:
    """The lengths of the long rows that are timed, on a grid for rows of up to `max_length`."""
    return sorted({min(max_length, n) for n in (SHORTEST_ROW, max_length // 2, max_length)})


def _grid(trial: Trial, max_row_length: int) -> BucketGrid:
    """The grid of a trial, for rows of all lengths that are timed."""
    if trial.chunk is not None:
        # a chunk of at most half the longest row: then whole chunks can hold the rows of _submit
        chunk = min(trial.chunk, max_row_length // 2)
        batch = min(trial.tokens_per_prefill // chunk, trial.slots)
        prefill = (PrefillBucket(max_row_length, batch, chunk),)
        return BucketGrid(max_row_length, prefill, trial.slots, STEPS_PER_CALL)
    lengths = sorted({SHORT_PROMPT, *map(_long_prompt, _row_lengths(max_row_length))})
    prefill = tuple(
        PrefillBucket(length, max(1, min(trial.tokens_per_prefill // length, trial.slots)))
        for length in lengths
    )
    return BucketGrid(max_row_length, prefill, trial.slots, STEPS_PER_CALL)


def _long_prompt(length: int) -> int:
    """The prompt length of a row that has a length after its last decode call."""
    return max(SHORT_PROMPT, length - STEPS_PER_CALL * CALLS_PER_SHAPE)


def _prompt_lengths(grid: BucketGrid, length: int) -> list[int]:
    """The prompt lengths of a full batch of rows, some of which reach a length.

    With chunks all rows are long, so that the prefill batches are full.
    """
    prompt, num_long = _long_prompt(length), grid.decode_slots
    if not grid.chunks:
        num_long = min(CALLS_PER_SHAPE * grid.bucket_of(prompt).batch, num_long)
    return [prompt] * num_long + [SHORT_PROMPT] * (grid.decode_slots - num_long)


def _submit(generator: Session, prompt_lengths: Sequence[int], vocab_size: int) -> None:
    """Submit rows of random tokens."""
    rng = np.random.default_rng(0)
    params = SamplingParams(
        temperature=0, max_tokens=STEPS_PER_CALL * CALLS_PER_SHAPE, ignore_eos=True
    )
    for row, prompt_length in enumerate(prompt_lengths):
        prompt = rng.integers(0, vocab_size, prompt_length).tolist()
        generator.submit(Request(str(row), prompt, params))


def _run(
    generator: Session,
    grid: BucketGrid,
    prompt_lengths: Sequence[int],
    clock: Callable[[], float],
    known: set[PrefillBucket | None],
) -> list[CallTiming]:
    """Run the submitted rows; return the timings of graphs with several calls.

    The rows decode together, so each decode call runs all steps. The graphs are added to those that
    have been called before: `known`, by their buckets, with None for decode.
    """
    timed: dict[PrefillBucket | None, list[tuple[float, float]]] = defaultdict(list)
    step_Q1 = np.arange(1, STEPS_PER_CALL * CALLS_PER_SHAPE + 1)[:, None]
    # the entries in whole pages that all rows read in a step, on average over all steps
    of_step = float(grid.whole_pages(np.array(prompt_lengths) + step_Q1).sum(axis=1).mean())
    while generator.unfinished:
        started = clock()
        action = generator.dispatch()
        generator.receive()
        taken = clock() - started
        generator.collect()
        match action:
            case PrefillAction(bucket=bucket, read_entries=entries):
                timed[bucket].append((entries, taken))
            case DecodeAction():
                timed[None].append((of_step, taken))
    timings = [
        _timing(grid, bucket, calls, is_first=bucket not in known)
        for bucket, calls in timed.items()
        if len(calls) > 1
    ]
    known.update(timed)
    return timings


def _timing(
    grid: BucketGrid,
    bucket: PrefillBucket | None,
    calls: Sequence[tuple[float, float]],
    *,
    is_first: bool,
) -> CallTiming:
    """The timing of the calls of a prefill graph, or of decode, from their entries and seconds."""
    entries = sum(read for read, _ in calls) / len(calls)
    first, *others = (seconds for _, seconds in calls)
    usual = statistics.median(others)
    first_call = first - usual if is_first else None
    if bucket is None:
        return CallTiming(grid.average_step(entries), usual / STEPS_PER_CALL, first_call)
    return CallTiming(grid.prefill_call(bucket, entries=entries), usual, first_call)
