"""Times of a profiled call by kind of work, compared with peaks of products and of memory.

Knows nothing of models. The kinds of work are those of `call_groups`.
"""

import glob
from collections import Counter
from typing import NamedTuple

import jax
from call_groups import KERNEL, PRODUCTS, SCORES, VALUES, Groups


class Call(NamedTuple):
    """Milliseconds and operations of a call by group, and the bytes of the cache it reads."""

    spent: Counter[str]
    flops: dict[str, float]
    cache_bytes: float

    def rate(self, *groups: str) -> float:
        """GFLOP/s of products together."""
        spent = sum(self.spent[group] for group in groups)
        return sum(self.flops.get(group, 0) for group in groups) / spent / 1e6 if spent else 0.0


def by_group(folder: str, groups: Groups) -> Counter[str]:
    """Milliseconds of a trace by group; an event does not include those within it on its thread."""
    (path,) = glob.glob(f"{folder}/**/*.xplane.pb", recursive=True)
    spent: Counter[str] = Counter()
    for plane in jax.profiler.ProfileData.from_file(path).planes:
        for line in plane.lines:
            events = [(x.start_ns, x.duration_ns, groups.of(x.name)) for x in line.events]
            spent.update(own_times([event for event in events if event[2]]))
    return spent


def own_times(events: list[tuple[float, float, str]]) -> Counter[str]:
    """Milliseconds by group, from one thread's `(start, duration, group)` in nanoseconds."""
    spent: Counter[str] = Counter()
    running: list[tuple[float, str]] = []
    for start, duration, group in sorted(events, key=lambda event: (event[0], -event[1])):
        while running and running[-1][0] <= start:
            running.pop()
        if running:
            spent[running[-1][1]] -= duration / 1e6
        spent[group] += duration / 1e6
        running.append((start + duration, group))
    return spent


def table(title: str, call: Call, ceiling: float) -> list[str]:
    """The groups of a call, the dearest first."""
    total = call.spent.total()
    lines = [
        f"\n## {title}: {total:.0f} ms\n",
        "| work | ms | share | GFLOP/s | of a large product |",
    ]
    lines += ["|:--|--:|--:|--:|--:|"]
    for group, spent in call.spent.most_common():
        rate = call.rate(group)
        of_products = f"{rate:.0f} | {rate / ceiling:.0%}" if rate else " | "
        lines.append(f"| {group} | {spent:.1f} | {spent / total:.1%} | {of_products} |")
    return lines


def bound(call: Call, ceiling: float, rate: float) -> str:
    """A sentence each on products with weights, and on those of attention."""
    total, weights, attention = call.spent.total(), set(PRODUCTS.values()), (SCORES, VALUES, KERNEL)
    of_weights, of_attention = (
        sum(call.spent[group] for group in groups) / total for groups in (weights, attention)
    )
    reached = call.rate(*weights)
    text = f"Products with weights take {of_weights:.0%} of the time, at {reached:.0f} GFLOP/s, "
    text += (
        f"{reached / ceiling:.0%} of the {ceiling:.0f} of a large product. Those of attention take "
    )
    text += f"{of_attention:.0%}, at {call.rate(*attention):.0f} GFLOP/s"
    if call.cache_bytes:
        read = call.cache_bytes / (of_attention * total) / 1e6
        text += f" and {read:.1f} GB/s of the cache, {read / rate:.0%} of the {rate:.1f} that "
        text += "memory gives"
    return text + "."
