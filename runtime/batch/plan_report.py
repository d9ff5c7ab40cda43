"""Reports the plan of a job as a short table, and the work that its padding wasted.

Does not know about rows or files.
"""

from collections.abc import Mapping
from itertools import product
from typing import Any

from ...compile.grids.bucket_grid import BucketGrid
from ...compile.plan import Plan
from ...compile.planning.work import Work
from ...sharding.call import Call
from ..console import align_columns, plural


def plan_table(plan: Plan, work: Work) -> str:
    """The plan as a table of its buckets, slots, pages and memory."""
    grid = plan.buckets
    output = "" if grid.embed else ", prompt and output"
    rows = [
        ("plan", f"{plan.target}, {plan.model.source}, {plan.numbers.dtype}"),
        ("rows", f"at most {plural(grid.max_length, 'token')}{output}"),
        ("embed" if grid.embed else "prefill", ", ".join(map(str, grid.prefill))),
        ("decode", _decode(grid)),
    ]
    if grid.prefixes is not None:
        shared, groups = plural(len(grid.prefixes.shared), "prefix"), grid.prefixes.groups
        rows.append(("prefixes", f"{shared}, read by at most {plural(groups, 'group')} of rows"))
    if plan.layout is not None:
        rows.append(("layout", f"{plan.layout.name}: {plan.layout.mesh}"))
    weights, cache = _size(work.parameter_bytes), _size(work.grid_bytes(grid))
    where = "" if plan.layout is None else " on each device"
    pages = ""
    if grid.pages is not None:
        pages = f" in {plural(grid.pages, 'page')} of {grid.page} entries"
    rows.append(("memory", f"weights {weights}, cache {cache}{pages}{where}"))
    return "\n".join(align_columns(rows, num_left=2))


def with_waste(statistics: Mapping[str, Any], grid: BucketGrid, work: Work) -> dict[str, Any]:
    """The statistics of a run, with operations, wasted operations and wasted seconds by bucket.

    A bucket's calls all take the same operations, so the share of its padding is the share of its
    operations and seconds that is wasted. Operations are those of all devices.
    """
    devices, buckets = work.layout.mesh.num_devices, statistics["buckets"]
    calls: dict[str, Call] = {}
    for bucket, is_scored in product(grid.prefill, (False, True)):
        name, entries = f"{bucket}{' scored' if is_scored else ''}", None
        if grid.chunks and (use := buckets["prefill"].get(name)) and use["calls"]:
            entries = use["read_entries"] / use["calls"]
        calls[name] = grid.prefill_call(bucket, is_scored=is_scored, entries=entries)
    steps = {
        name: grid.average_step(*(use[f"{x}_entries"] / use["steps"] for x in ("read", "seen")))
        for name, use in buckets["decode"].items()
        if use["steps"]
    }
    flops = {
        name: devices * sum(part.flops for part in work.parts(call))
        for name, call in (*calls.items(), *steps.items())
    }
    found = {
        phase: {
            name: use | _wasted(use, flops.get(name), counted, real)
            for name, use in buckets[phase].items()
        }
        for phase, counted, real in (
            ("prefill", "calls", "real_tokens"),
            ("decode", "steps", "emitted_tokens"),
        )
    }
    return {**statistics, "buckets": found}


def _wasted(
    use: Mapping[str, Any], flops: float | None, counted: str, real: str
) -> dict[str, float | None]:
    """The figures of one bucket; `flops` are those of one call, None if they are not known."""
    computed = use["computed_tokens"]
    share = 1 - use[real] / computed if computed else 0.0
    total = None if flops is None else flops * use[counted]
    return {
        "flops": total,
        "wasted_flops": None if total is None else total * share,
        "wasted_seconds": use["seconds"] * share,
    }


def _decode(grid: BucketGrid) -> str:
    if grid.embed:
        return "none, as texts become vectors"
    if not grid.decode_slots:
        return "none, as rows are only scored"
    steps, longest = plural(grid.steps_per_call, "step"), plural(grid.max_length, "token")
    return f"{plural(grid.decode_slots, 'slot')}, {steps} in a call of rows up to {longest}"


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"
