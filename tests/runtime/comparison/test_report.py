"""Reports of compared models whose figures or names are extreme."""

import json

import numpy as np
import pytest

from noria.runtime.comparison.compare import ComparedModel, Comparison
from noria.runtime.comparison.report import draw, markdown, to_json
from noria.runtime.comparison.statistics import PairFigures


def comparison_of(*losses: float, name: str = "m") -> Comparison:
    """A comparison with a model for each loss; the first is that of the reference."""
    reference, *others = losses
    figures = [
        PairFigures.of([np.array([[0.1, 1, -reference, -loss, 0.0]] * n) for n in (2, 3)])
        for loss in others
    ]
    models = tuple(ComparedModel(f"{name}{i}") for i in range(len(losses)))
    return Comparison(models, tuple(figures), 2, 5, read_answers=True)


@pytest.mark.parametrize("losses", [(1.0, 2.0, 800.0), (800.0, 2.0), (700.0, 709.7, 2.0)])
def test_a_report_holds_any_perplexity(losses):
    comparison = comparison_of(*losses)
    text = json.dumps(to_json(comparison), allow_nan=False)
    means = [compared["perplexity"]["mean"] for compared in json.loads(text)["compared"]]
    assert means == [None if loss > 709.78 else pytest.approx(np.exp(loss)) for loss in losses[1:]]
    table = markdown(comparison)
    assert ("inf ± ?" in table) == (800.0 in losses)
    assert max(map(len, table.splitlines())) < 200
    assert draw(comparison).startswith(b"\x89PNG")


def test_dollars_in_the_name_of_a_model_are_no_formulas():
    assert draw(comparison_of(1.0, 2.0, name="a$\\b$")).startswith(b"\x89PNG")
