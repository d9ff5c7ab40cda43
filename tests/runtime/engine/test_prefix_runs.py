"""Real runs with planned prefixes, against runs of whole prompts."""

from collections import deque
from dataclasses import replace

import numpy as np
import pytest
from related_prompts import hash_tokens
from tiny import TWO_LAYERS as CONFIG
from tiny import TinyModel
from tolerances import FLOAT32_MODEL_LOGPROB
from unoptimized import set_optimized

from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefix_grid import PlannedPrefix, PrefixGrid
from noria.runtime.errors import RowError
from noria.runtime.planning.simulator import SimulatedRow, schedule
from noria.runtime.request import Request, RequestOutput, SamplingParams


def planned(tokens: list[int]) -> PlannedPrefix:
    return PlannedPrefix(len(tokens), hash_tokens(tokens))


RNG = np.random.default_rng(2)
SYSTEM, OTHER, LONG = (RNG.integers(3, CONFIG.vocab_size, n).tolist() for n in (9, 17, 15))
DOCUMENT = SYSTEM + LONG
NAN_TOKEN = 150
EARLY, LATE = ([*DOCUMENT[:at], NAN_TOKEN, *DOCUMENT[at + 1 :]] for at in (3, 20))
"""Two prefixes of two pieces, one with a token that is poisoned in the first piece."""
GRID = BucketGrid(
    max_length=112,
    prefill=((112, 4, 8),),
    decode_slots=6,
    steps_per_call=4,
    page=8,
    prefixes=PrefixGrid(4, 2, 16, tuple(map(planned, (SYSTEM, DOCUMENT, OTHER, EARLY, LATE)))),
)
SMALL_GRID = replace(GRID, pages=28, row_tokens=32, prefixes=replace(GRID.prefixes, groups=2))
"""Pages for two of the longest rows, those of each slot for windows, and places for few rows."""
WHOLE_GRID = BucketGrid(112, ((80, 2),), 6, steps_per_call=4)
GREEDY = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
SAMPLING = {
    "greedy": GREEDY,
    "two samples": SamplingParams(temperature=1, seed=4, n=2, max_tokens=9, logprobs=2),
    "penalties": replace(
        GREEDY, repetition_penalty=2.0, presence_penalty=0.4, frequency_penalty=0.7
    ),
    "random": SamplingParams(temperature=1, max_tokens=13, logprobs=1),
    "minimum": replace(GREEDY, min_tokens=6, stop_token_ids=list(range(3, 150, 5))),
    "many samples": SamplingParams(temperature=1, seed=9, n=5, max_tokens=6, logprobs=2),
}


@pytest.fixture(scope="module")
def model(optimizes: bool) -> TinyModel:
    set_optimized(optimizes)
    return TinyModel(CONFIG, GRID)


@pytest.fixture(scope="module")
def whole_model(model) -> TinyModel:
    """Return the same model with a plan without prefixes."""
    return TinyModel(CONFIG, WHOLE_GRID)


def requests(sampling: dict[str, SamplingParams] = SAMPLING) -> list[Request]:
    """Return rows of each kind for each beginning; some have only the tokens of a prefix."""
    rng = np.random.default_rng(6)
    rows = []
    for name, params in sampling.items():
        for i, beginning in enumerate((DOCUMENT, SYSTEM, [], OTHER, DOCUMENT)):
            own = rng.integers(3, NAN_TOKEN, rng.integers(1, 30)).tolist()
            rows.append(Request(f"{name} {i}", beginning + own, params))
        rows.append(Request(f"{name} equal", DOCUMENT, params))
    return rows


def outputs_of(generator, rows: list[Request]) -> dict[str, RequestOutput]:
    for row in rows:
        generator.submit(row)
    return {output.request_id: output for output in generator.run()}


def assert_same_bits(got: dict[str, RequestOutput], expected: dict[str, RequestOutput]) -> None:
    for name, output in got.items():
        assert output.error is None
        assert output.outputs == expected[name].outputs


@pytest.fixture(scope="module")
def outputs(model) -> dict[str, RequestOutput]:
    return outputs_of(model.generator(), requests())


def test_rows_are_those_of_a_plan_without_prefixes(model, whole_model, outputs):
    expected = outputs_of(whole_model.generator(), requests())
    assert set(outputs) == set(expected)
    for name, output in outputs.items():
        assert output.error is None
        for got, wanted in zip(output.outputs, expected[name].outputs, strict=True):
            assert got.token_ids == wanted.token_ids, name
            assert got.finish_reason == wanted.finish_reason
            for a, b in zip(got.logprobs, wanted.logprobs, strict=True):
                assert a.logprob == pytest.approx(b.logprob, abs=FLOAT32_MODEL_LOGPROB)


def test_the_parameters_of_rows_change_their_tokens(outputs):
    """Otherwise the comparison above would show nothing about them."""
    tokens = {name: [o.token_ids for o in output.outputs] for name, output in outputs.items()}
    assert tokens["greedy 0"] != tokens["penalties 0"]
    assert any(len(tokens[f"minimum {i}"][0]) > 6 for i in range(5))
    assert len(set(map(tuple, tokens["many samples 0"]))) > 1


def test_rows_have_the_same_bits_in_any_order_and_company(model, outputs):
    rows = requests()
    order = np.random.default_rng(0).permutation(len(rows))
    assert_same_bits(outputs_of(model.generator(), [rows[i] for i in order]), outputs)
    assert_same_bits(outputs_of(model.generator(), rows[3:12]), outputs)
    for part in (rows[:15], rows[15:]):
        assert_same_bits(outputs_of(model.generator(), part), outputs)


def test_an_abandoned_run_leaves_no_prefix(model, outputs):
    generator, rows = model.generator(), requests()
    for row in rows:
        generator.submit(row)
    for _ in range(9):
        generator.step()
    generator.abandon()
    assert_same_bits(outputs_of(generator, rows[::-1]), outputs)


def test_a_prefix_with_nan_fails_its_rows_and_no_others(model, outputs):
    table = model.parameters["embedding.table"].at[NAN_TOKEN].set(np.nan)
    parameters = model.parameters | {"embedding.table": table}
    rows = [row for row in requests() if NAN_TOKEN not in met_by(outputs[row.request_id])]
    assert len(rows) >= 30
    for poisoned in (EARLY, LATE):
        generator = model.generator(parameters=parameters)
        bad = [Request(f"bad {i}", [*poisoned, 5 + i], GREEDY) for i in range(8)]
        failed = outputs_of(generator, bad)
        assert {output.error and output.error.code for output in failed.values()} == {
            "nonfinite_logits"
        }
        assert_same_bits(outputs_of(generator, rows[::-1]), outputs)


def met_by(output: RequestOutput) -> set[int]:
    chosen = (set(o.token_ids) for o in output.outputs)
    return set(output.prompt_token_ids).union(*chosen)


def test_the_simulator_has_the_tokens_and_calls_of_the_run(model, outputs):
    rows = requests()
    got, expected = run_as_a_job(model, rows)
    assert_same_bits(got, outputs)
    assert_simulated(model.grid, rows, got, expected)
    assert expected.decode.read_entries < 0.9 * expected.decode.seen_entries


def growing_requests() -> list[Request]:
    """Return short answers, and then long ones, which need more pages than expected."""
    rng = np.random.default_rng(7)
    rows = []
    for i in range(24):
        beginning = (DOCUMENT, SYSTEM, [], OTHER)[(i if i < 12 else i // 3) % 4]
        own = rng.integers(3, NAN_TOKEN, rng.integers(1, 16)).tolist()
        params = replace(GREEDY, max_tokens=2 if i < 12 else 28, ignore_eos=True)
        rows.append(Request(f"growing {i}", beginning + own, params))
    return rows


def test_rows_in_few_pages_have_the_same_tokens_and_are_simulated(model):
    small, rows = TinyModel(CONFIG, SMALL_GRID), [*growing_requests(), *requests()]
    outputs = outputs_of(model.generator(), rows)
    got, metrics = run_as_a_job(small, rows)
    assert set(got) == set(outputs)
    for name, output in got.items():
        assert output.error is None
        tokens = [o.token_ids for o in output.outputs]
        assert tokens == [o.token_ids for o in outputs[name].outputs], name
    assert metrics.pages.waits and metrics.pages.replays
    assert_simulated(SMALL_GRID, rows, got, metrics)


def run_as_a_job(model: TinyModel, rows: list[Request]):
    """Return outputs and metrics of rows that are submitted as a job and the simulator do."""
    generator = model.generator()
    waiting, got = deque(rows), {}
    while waiting or generator.unfinished:
        while waiting and generator.wants_more:
            generator.submit(waiting.popleft())
        got |= {output.request_id: output for output in generator.step()}
    return got, generator.metrics


def assert_simulated(grid: BucketGrid, rows, got: dict[str, RequestOutput], expected) -> None:
    """Compare the metrics of a run with those of the simulator."""
    simulated = []
    for row in rows:
        prefix = grid.prefixes.prefix_of(row.prompt_token_ids)
        length = len(row.prompt_token_ids)
        emitted = tuple(len(o.token_ids) for o in got[row.request_id].outputs)
        limit = length + row.params.max_tokens
        simulated.append(SimulatedRow(length, limit, emitted, planned_prefix=prefix))
    metrics = schedule(grid, simulated).priced(grid, None).metrics
    for name in ("forks", "copied_tokens", "prefix_tokens", "padding", "shared_prefixes", "pages"):
        assert getattr(metrics, name) == getattr(expected, name)
    calls, wanted = (
        {name: replace(use, seconds=0) for name, use in {**m.prefill, "decode": m.decode}.items()}
        for m in (metrics, expected)
    )
    assert calls == wanted


def test_other_tokens_with_the_hash_of_a_prefix_are_refused(model, monkeypatch):
    generator = model.generator()
    generator.submit(Request("true", [*DOCUMENT, 5], GREEDY))
    monkeypatch.setattr(PrefixGrid, "prefix_of", lambda *_: planned(DOCUMENT))
    forged = Request("forged", [7] * 30, GREEDY)
    for refuse in (generator.check, generator.submit):
        with pytest.raises(
            RowError, match=r"'forged': expected the first 24 tokens .* Remove"
        ) as e:
            refuse(forged)
        assert e.value.code == "invalid_request"
    (output,) = generator.run()
    assert output.error is None


def test_the_prefix_of_a_row_is_looked_up_once(model, monkeypatch):
    looked_up = []

    def prefix_of(grid: PrefixGrid, token_ids, adapter):
        looked_up.append(token_ids)
        return planned(DOCUMENT)

    monkeypatch.setattr(PrefixGrid, "prefix_of", prefix_of)
    model.generator().submit(Request("row", [*DOCUMENT, 5], GREEDY))
    assert looked_up == [[*DOCUMENT, 5]]
