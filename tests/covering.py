"""Combinations of parameters of which the default run takes enough that every value occurs.

The other combinations are slow tests: each commit runs a tenth of these.
"""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest


def covering(*parameters: Sequence[Any]) -> list[Any]:
    """Return all combinations as cases of a test; those beyond a cover of all values are slow.

    Case i of the cover has value i of every parameter, and begins again after the last value of a
    shorter one: for 2 and 3 values it is `[(a0, b0), (a1, b1), (a0, b2)]`.
    """
    longest = max(map(len, parameters))
    covered = {tuple(i % len(values) for values in parameters) for i in range(longest)}
    cases = []
    for indices in product(*(range(len(values)) for values in parameters)):
        values = [own[index] for own, index in zip(parameters, indices, strict=True)]
        marks = () if indices in covered else pytest.mark.slow
        cases.append(pytest.param(*values, marks=marks))
    return cases
