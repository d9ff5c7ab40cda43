"""The summary of a plan: the evidence of its seconds."""

import pytest

from noria.runtime.planning.summary import _evidence, _rates

RATES = {"output_tokens_per_second": 6988.4, "rows_per_hour": 128800.0, "price": None}


@pytest.mark.parametrize("costs", ["published peaks", "assumed peaks"])
def test_seconds_from_peaks_say_how_much_longer_runs_took(costs):
    assert _evidence(costs) == f"{costs}: runs took 1.5 to 2 times as long where they were measured"


@pytest.mark.parametrize("costs", ["measured h200, jax 0.11.2", "compiler's cycles"])
def test_other_evidence_stands_alone(costs):
    assert _evidence(costs) == costs


def test_rates_have_a_price_if_the_hardware_has_one():
    assert _rates(RATES) == "6,988 output tokens/s and 128,800 rows an hour while it runs"
    assert _rates({**RATES, "price": 1.25}).endswith("while it runs; price 1.25 with the build")
