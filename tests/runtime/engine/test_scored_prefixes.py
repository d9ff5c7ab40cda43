"""Scored prompts that begin alike: computed once, with the bits of prompts scored alone."""

from dataclasses import replace

import numpy as np
import pytest
from tiny import TWO_LAYERS as CONFIG
from tiny import TinyModel
from unoptimized import set_optimized

from noria.compile.grids.bucket_grid import BucketGrid
from noria.runtime.engine.shared_prefixes import Submission, plan_submission
from noria.runtime.planning.simulator import SimulatedRow, schedule
from noria.runtime.request import Request, SamplingParams
from noria.runtime.rows.prefix_index import PrefixIndex

GRID = BucketGrid(112, ((112, 2, 8),), 10, page=8, steps_per_call=4, score=True)
HEADER = np.random.default_rng(5).integers(3, CONFIG.vocab_size, 40).tolist()
ONLY = SamplingParams(max_tokens=0, prompt_logprobs=0)
SCORED = {
    "only": ONLY,
    "alternatives": replace(ONLY, prompt_logprobs=2),
    "and answered": SamplingParams(temperature=0, max_tokens=5, prompt_logprobs=0, n=2),
}


def requests() -> list[Request]:
    """Return scored rows after 40, 36 and 16 tokens of a header, and rows that are not scored."""
    rng = np.random.default_rng(6)
    rows = []
    for name, params in (*SCORED.items(), ("plain", SamplingParams(temperature=0, max_tokens=4))):
        for i, length in enumerate((40, 40, 16, 36, 0, 40)):
            own = rng.integers(3, CONFIG.vocab_size, rng.integers(1, 20)).tolist()
            rows.append(Request(f"{name} {i}", HEADER[:length] + own, params))
    return rows


def submission_of(rows: list[Request]) -> Submission:
    index = PrefixIndex()
    for i, row in enumerate(rows):
        index.add(i, row.prompt_token_ids, row.params.prompt_logprobs)
    lengths = [(len(row.prompt_token_ids), row.params.max_tokens) for row in rows]
    return plan_submission(lengths, index.table(), GRID)


@pytest.fixture(scope="module")
def model(optimizes: bool) -> TinyModel:
    set_optimized(optimizes)
    return TinyModel(CONFIG, GRID)


def run(model: TinyModel, rows: list[Request], submission: Submission):
    generator = model.generator()
    generator.reserve(submission.num_held)
    for row, prefix in zip(submission.rows, submission.prefixes, strict=True):
        generator.submit(rows[row], prefix)
    outputs = {output.request_id: output for output in generator.run()}
    assert all(output.error is None for output in outputs.values())
    found = {name: (o.outputs, o.prompt_logprobs) for name, o in outputs.items()}
    return found, generator.metrics


def without_prefixes(submission: Submission) -> Submission:
    return Submission(submission.rows, [None] * len(submission.rows))


def test_a_copied_beginning_has_the_log_probabilities_of_a_computed_one(model):
    rows = requests()
    submission = submission_of(rows)
    shared, metrics = run(model, rows, submission)
    whole, plain = run(model, rows, without_prefixes(submission))
    assert shared == whole
    for row in rows:
        scores = shared[row.request_id][1]
        if row.params.prompt_logprobs is not None:
            assert [s and s.token_id for s in scores] == [None, *row.prompt_token_ids[1:]]
    # each kind of rows computes the header, or its first 16 tokens, once
    assert metrics.saved_tokens > 4 * 2 * 32 and plain.saved_tokens == 0


def test_rows_that_differ_in_the_token_after_a_beginning_share_less():
    """Its log-probability is that of the beginning's last position."""
    own = [[7, 8], [9, 8], [7, 9]]
    rows = [Request(f"row {i}", HEADER[:32] + ids, ONLY) for i, ids in enumerate(own)]
    lengths = [prefix and prefix.length for prefix in submission_of(rows).prefixes]
    assert sorted(lengths) == [16, 32, 32]
    plain = [replace(row, params=SamplingParams(max_tokens=1)) for row in rows]
    assert [prefix and prefix.length for prefix in submission_of(plain).prefixes] == [32] * 3


def test_only_rows_that_ask_for_as_many_alternatives_share():
    prompt = [*HEADER[:32], 7, 8]
    counts = [0, 2, None]
    rows = [
        Request(f"row {i}", prompt, SamplingParams(max_tokens=1, prompt_logprobs=count))
        for i, count in enumerate(counts)
    ]
    assert submission_of(rows).prefixes == [None] * 3
    assert None not in submission_of([*rows, *rows]).prefixes


def test_a_hash_of_other_prompts_or_kinds_is_not_trusted(model):
    rows = requests()
    submission = submission_of(rows)
    places = [i for i, prefix in enumerate(submission.prefixes) if prefix is not None]
    changed = rows[submission.rows[places[-1]]]
    other = [3 + (token - 2) % 100 for token in changed.prompt_token_ids]
    rows[submission.rows[places[-1]]] = replace(changed, prompt_token_ids=other)
    kinds = rows[submission.rows[places[0]]]
    rows[submission.rows[places[0]]] = replace(
        kinds, params=replace(kinds.params, prompt_logprobs=1)
    )
    shared, _ = run(model, rows, submission)
    whole, _ = run(model, rows, without_prefixes(submission))
    assert shared == whole


@pytest.mark.parametrize("steps", [2, 5, 9])
def test_rows_in_flight_keep_their_log_probabilities_when_the_rest_is_dropped(model, steps):
    rows = requests()
    submission = submission_of(rows)
    whole, _ = run(model, rows, without_prefixes(submission))
    generator = model.generator()
    generator.reserve(submission.num_held)
    for row, prefix in zip(submission.rows, submission.prefixes, strict=True):
        generator.submit(rows[row], prefix)
    outputs = [output for _ in range(steps) for output in generator.step()]
    dropped = generator.drain()
    outputs += generator.run()
    assert len(outputs) + len(dropped) == len(rows) and dropped
    for output in outputs:
        assert (output.outputs, output.prompt_logprobs) == whole[output.request_id]


def test_the_simulator_has_the_calls_of_the_run(model):
    rows = requests()
    submission = submission_of(rows)
    outputs, metrics = run(model, rows, submission)
    simulated = []
    for row, prefix in zip(submission.rows, submission.prefixes, strict=True):
        request, length = rows[row], len(rows[row].prompt_token_ids)
        emitted = tuple(len(o.token_ids) for o in outputs[request.request_id][0])
        emitted = emitted if request.params.max_tokens else ()
        is_scored = request.params.prompt_logprobs is not None
        limit = length + request.params.max_tokens
        simulated.append(SimulatedRow(length, limit, emitted, is_scored=is_scored, prefix=prefix))
    got = schedule(GRID, simulated, submission.num_held).priced(GRID, None).metrics
    for name in ("forks", "copied_tokens", "prefix_tokens", "padding"):
        assert getattr(got, name) == getattr(metrics, name)
