"""The cheapest way to cut sorted lengths into buckets, found exactly.

Lengths are served by borders, each taking those above the border before it. The cost of a bucket
depends on its two borders alone, so a cheapest choice that ends with the bucket (a, b] consists of
that bucket and a cheapest choice that ends at a: otherwise a cheaper one would do better there, too
(Bellman's principle of optimality, "Dynamic Programming", 1957). Trying every a for every b, graph
by graph, therefore finds a cheapest choice of at most so many buckets.

Knows nothing of models, hardware or what a cost is.
"""

from collections.abc import Callable

import numpy as np

Costs = Callable[[int], np.ndarray]
"""Costs of the buckets that end at border `end`: entry s begins at border s, and at 0 for the
first."""


def cheapest_cuts(
    costs: Costs, num_borders: int, most: int, cost_of_bucket: float = 0
) -> list[int]:
    """Indices of the borders that end the buckets of least cost in all, the last one among them.

    `costs(end)` has `end + 1` entries: the cost of a bucket over borders `s..end`, for s from 0 to
    `end`. Of equally cheap choices, one of fewest buckets.
    """
    of_end = [np.asarray(costs(end), float) + cost_of_bucket for end in range(num_borders)]
    # cheapest[b]: of the borders below b, in exactly so many buckets
    cheapest = np.full(num_borders + 1, np.inf)
    cheapest[0] = 0.0
    best, chosen = np.inf, []
    steps: list[np.ndarray] = []
    for _ in range(min(most, num_borders)):
        totals = [cheapest[: end + 1] + of_end[end] for end in range(num_borders)]
        starts = np.array([0, *(int(total.argmin()) for total in totals)])
        cheapest = np.array([np.inf, *(float(total.min()) for total in totals)])
        steps.append(starts)
        if cheapest[num_borders] < best:
            best, chosen = cheapest[num_borders], _walk_back(steps, num_borders)
    return chosen


def _walk_back(steps: list[np.ndarray], border: int) -> list[int]:
    ends = []
    for starts in reversed(steps):
        ends.append(border - 1)
        border = int(starts[border])
    return ends[::-1]
