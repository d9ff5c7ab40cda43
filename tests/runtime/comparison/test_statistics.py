"""Standard errors over rows, against plain formulas and many samples."""

import math

import numpy as np
import pytest

from noria.runtime.comparison.statistics import (
    Estimate,
    PairFigures,
    mean_over_rows,
    perplexity,
)


def test_rows_of_one_length_have_the_error_of_the_mean_of_their_means():
    rows = np.random.default_rng(0).normal(size=(9, 5))
    estimate = mean_over_rows(list(rows))
    means = rows.mean(axis=1)
    assert estimate.mean == pytest.approx(rows.mean())
    assert estimate.error == pytest.approx(means.std(ddof=1) / 3)


def test_the_error_is_that_of_many_samples_of_rows():
    """Tokens of a row share a value, so an error over tokens would be far too small."""
    rng = np.random.default_rng(0)

    def sample():
        lengths = rng.integers(5, 15, 40)
        return [rng.normal(size=1) + rng.normal(scale=0.1, size=n) for n in lengths]

    estimates = [mean_over_rows(sample()) for _ in range(300)]
    spread = np.std([estimate.mean for estimate in estimates])
    assert np.mean([estimate.error for estimate in estimates]) == pytest.approx(spread, rel=0.15)


def test_one_row_has_no_error():
    assert mean_over_rows([np.array([1.0, 3.0])]) == Estimate(2.0, None)
    assert Estimate(2.0, None).text(1) == "2.0 ± ?"
    assert Estimate(0.5, 0.01).text(1, 100) == "50.0 ± 1.0"


def test_perplexity_is_the_exponential_of_the_mean_loss():
    rows = [np.log(np.array([0.5, 0.25])), np.log(np.array([0.125, 0.125]))]
    estimate = perplexity(rows)
    assert estimate.mean == pytest.approx(2 ** (9 / 4))
    assert estimate.error == pytest.approx(estimate.mean * mean_over_rows(rows).error)


def test_figures_keep_the_order_of_fields():
    rows = [np.array([[0.1, 1, -1, -2, 0], [0.3, 0, -3, -4, 0.6]])]
    rows.append(np.array([[0.2, 1, -2, -3, 0]]))
    figures = PairFigures.of(rows)
    assert figures.divergence.mean == pytest.approx(0.2)
    assert figures.agreement.mean == pytest.approx(2 / 3)
    assert figures.reference_perplexity.mean == pytest.approx(math.exp(2))
    assert figures.perplexity.mean == pytest.approx(math.exp(3))
    assert figures.divergence_quantiles[1.0] == pytest.approx(0.3)
    assert figures.widest_gap == pytest.approx(0.6)


@pytest.mark.parametrize("loss", [710.0, 3e38])
def test_a_perplexity_above_all_floats_is_infinite(loss):
    rows = [np.array([-loss]), np.array([-loss, -loss])]
    estimate = perplexity(rows)
    assert estimate == Estimate(math.inf, None) and estimate.text(3) == "inf ± ?"
    assert estimate.as_json() == {"mean": None, "standard_error": None}


def test_an_error_above_all_floats_is_no_number_in_json():
    estimate = perplexity([np.array([-700.0]), np.array([-719.0])])
    assert math.isfinite(estimate.mean) and estimate.error == math.inf
    assert estimate.as_json() == {"mean": estimate.mean, "standard_error": None}


def test_large_numbers_are_short():
    assert Estimate(1.5e300, 2.5e299).text(3) == "1.500e+300 ± 2.500e+299"
    assert Estimate(999999.0, 0.25).text(2) == "999999.00 ± 0.25"
