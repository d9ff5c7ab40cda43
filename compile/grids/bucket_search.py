"""Exact search for the cheapest way to cut sorted lengths into buckets.

Each bucket ends at a border and takes the lengths above the border before it. The cost of a bucket
depends only on its two borders. So a cheapest choice that ends with the bucket (a, b] consists of
this bucket and a cheapest choice that ends at a; otherwise a cheaper choice that ends at a would
also give a cheaper whole (Bellman's principle of optimality, "Dynamic Programming", 1957). The
search tries every a for every b, one more bucket in each round, and so finds a cheapest choice of
at most `max_buckets` buckets.

Knows nothing of models, hardware, or the meaning of a cost.
"""

from collections.abc import Callable

import numpy as np

Costs = Callable[[int], np.ndarray]
"""Costs of the buckets that end at border `end`: entry s is the cost of the bucket over the
borders s to `end`."""


def cheapest_cuts(
    costs: Costs, num_borders: int, max_buckets: int, cost_of_bucket: float = 0
) -> list[int]:
    """Indices of the borders that end the buckets of a cheapest choice, the last border included.

    Among equally cheap choices, one with the fewest buckets is returned.

    Args:
      costs: The costs of all buckets that end at a border, as an array of `end + 1` entries.
      num_borders: Number of borders.
      max_buckets: Maximum number of buckets.
      cost_of_bucket: Cost of every bucket, added to `costs`.
    """
    costs_by_end = [np.asarray(costs(end), float) + cost_of_bucket for end in range(num_borders)]
    # cheapest[b]: least cost of serving the borders below b with exactly this number of buckets
    cheapest = np.full(num_borders + 1, np.inf)
    cheapest[0] = 0.0
    best, chosen = np.inf, []
    steps: list[np.ndarray] = []
    for _ in range(min(max_buckets, num_borders)):
        totals = [cheapest[: end + 1] + costs_by_end[end] for end in range(num_borders)]
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
