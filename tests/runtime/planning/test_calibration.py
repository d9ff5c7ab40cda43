"""Calibration on the local machine: every kind of call is timed."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
from alike import changed
from decode_steps import step_of
from tiny import CONFIG, EOS_ID, random_parameters

from noria.compile.abstract_model import AbstractModel
from noria.compile.hardware.hardware import Hardware
from noria.compile.planning.cost import CostModel
from noria.compile.planning.work import Work
from noria.compile.targets import find_target
from noria.runtime.planning import calibration
from noria.runtime.planning.calibration import Trial, measure
from noria.runtime.session import LoadedModel
from noria.sharding.call import KINDS, Call

HARDWARE = Hardware("mine", "made up", {"float32": 1e9}, 1e9, 1e8, 1e7, [])
TRIALS = (Trial(4, 32), Trial(4, 32, chunk=16))


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    definition, target = AbstractModel(changed(CONFIG, windows=(None,))), find_target("cpu")
    spec = SimpleNamespace(other_tokens={})
    files = cast(Any, SimpleNamespace(name="tiny", fingerprint=lambda: "sha256:0", spec=spec))
    parameters = random_parameters(definition)
    placement = target.placement()
    return LoadedModel(files, definition, parameters, None, (EOS_ID,), "float32", target, placement)


def test_every_kind_of_call_is_timed(model):
    lines = []
    found = measure(model, HARDWARE, 64, on_trial=lines.append, trials=TRIALS)
    assert set(found.kinds) == set(KINDS)
    assert [line.split(",")[0] for line in lines] == [
        "calibration: whole prompts",
        "calibration: chunks of 16",
    ]
    cost = CostModel(Work(model.definition, "float32"), HARDWARE, found)
    for call in (Call("prefill", 1, 32, 32), step_of(4, 64)):
        assert 1e-5 < cost.seconds(call) < 1


def test_a_clock_that_ticks_alike_at_every_call_leaves_nothing_but_overhead(model):
    ticks = iter(range(10**6))
    found = measure(model, HARDWARE, 64, clock=lambda: float(next(ticks)), trials=TRIALS)
    cost = CostModel(Work(model.definition, "float32"), HARDWARE, found)
    assert cost.seconds(Call("prefill", 1, 32, 32)) == pytest.approx(1.0, rel=1e-3)
    # a call of eight steps
    assert cost.seconds(step_of(4, 64)) == pytest.approx(1 / 8, rel=1e-3)
    assert found.median_error < 1e-3


@pytest.mark.parametrize("longest", [48, 49, 63, 65, 255])
def test_the_longest_row_of_a_trial_fits_its_chunks(longest):
    """Rows have 16 tokens and 32 of output, or as many as the longest row of the grid."""
    for trial in calibration.TRIALS:
        grid = calibration._grid(trial, longest)
        assert grid.fit(calibration._long_prompt(grid.max_length), 32)


def test_rows_that_are_too_short_to_time_are_refused(model):
    with pytest.raises(ValueError, match="at least 48 positions, got 40"):
        measure(model, HARDWARE, 40, trials=TRIALS)
