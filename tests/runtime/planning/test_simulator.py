"""The simulator against real runs: with a run's output lengths it has exactly the run's counts."""

import numpy as np
import pytest
from alike import changed
from tiny import CHUNK_GRID, CONFIG, FEW_PAGES_CHUNK_GRID, GRID, TAIL_GRID, TinyModel, prompts

from noria.runtime.planning.simulator import SimulatedRow, schedule
from noria.runtime.request import Request, SamplingParams

COUNTS = ("calls", "rows", "steps", "real_tokens", "computed_tokens", "emitted_tokens")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(GRID, id="whole"),
        # chunks of two sizes are in every run
        pytest.param(CHUNK_GRID, id="chunks", marks=pytest.mark.slow),
        pytest.param(TAIL_GRID, id="tails"),
        pytest.param(FEW_PAGES_CHUNK_GRID, id="few pages"),
    ],
)
def model(request) -> TinyModel:
    # the counts do not depend on layers
    return TinyModel(changed(CONFIG, windows=(None,)), request.param)


def mixed_requests(seed: int) -> list[Request]:
    """Return rows that end at a limit, at a stop id, or at once; some are scored, some generate."""
    rng = np.random.default_rng(seed)
    requests = []
    for i, row in enumerate(prompts(40, seed=seed)):
        params = SamplingParams(
            temperature=1.0,
            max_tokens=int(rng.integers(1, 16)) if i % 7 else 0,
            n=1 if i % 5 or not i % 7 else 3,
            stop_token_ids=tuple(map(int, rng.integers(3, 151, 8))),
            prompt_logprobs=1 if not i % 4 or not i % 7 else None,
        )
        requests.append(Request(f"row-{i}", row, params))
    return requests


def as_it_ran(requests, outputs) -> list[SimulatedRow]:
    rows = []
    for request in requests:
        length, params = len(request.prompt_token_ids), request.params
        lengths = tuple(len(o.token_ids) for o in outputs[request.request_id].outputs)
        emitted = lengths if params.max_tokens else ()
        is_scored = params.prompt_logprobs is not None
        rows.append(SimulatedRow(length, length + params.max_tokens, emitted, is_scored=is_scored))
    return rows


def counts(report) -> dict:
    """Return a report without its times."""
    uses = {
        f"{phase} {name}": {key: use[key] for key in COUNTS if key in use}
        for phase, of_phase in report["buckets"].items()
        for name, use in of_phase.items()
    }
    return uses | {key: report[key] for key in ("padding", "waits", "replays") if key in report}


def ran(model: TinyModel, requests):
    """Run requests in a job's order; return the outputs and counters."""
    generator, waiting, outputs = model.generator(), list(requests), {}
    while waiting or generator.unfinished:
        while waiting and generator.wants_more:
            generator.submit(waiting.pop(0))
        outputs |= {output.request_id: output for output in generator.step()}
    return outputs, generator.metrics


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.slow] * (seed > 1)) for seed in range(4)]
)
def test_calls_padding_and_occupancy_are_those_of_the_run(model, seed):
    requests = mixed_requests(seed)
    outputs, metrics = ran(model, requests)
    simulation = schedule(model.grid, as_it_ran(requests, outputs)).priced(model.grid, None)
    assert counts(simulation.metrics.report()) == counts(metrics.report())
    assert simulation.metrics.forks == metrics.forks
    assert simulation.metrics.pages == metrics.pages
    assert (metrics.pages.waits > 0) == (model.grid.pages < model.grid.most_pages)
    assert simulation.occupancy == metrics.decode.live_tokens / metrics.decode.computed_tokens


def test_one_token_more_in_a_row_shows(model):
    requests = mixed_requests(0)
    outputs, metrics = ran(model, requests)
    rows = as_it_ran(requests, outputs)
    i = next(i for i, row in enumerate(rows) if row.outputs and row.outputs[0] < 8)
    longer = (rows[i].outputs[0] + 1, *rows[i].outputs[1:])
    rows[i] = SimulatedRow(rows[i].prompt_length, rows[i].limit + 1, longer)
    assert counts(schedule(model.grid, rows).priced(model.grid, None).metrics.report()) != counts(
        metrics.report()
    )


def test_what_a_stop_string_ends_runs_to_the_end_of_its_call():
    row = SimulatedRow(8, 40, (6,), ends_on_host=True)
    simulation = schedule(GRID, [row]).priced(GRID, None)
    assert simulation.metrics.cut_tokens == 2
    assert simulation.metrics.emitted_tokens == 6
    padding = simulation.metrics.report()["padding"]
    assert padding["overshoot_tokens"] == 2
