"""Results of layouts as a table for the terminal. Knows nothing of how they were measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...compile.layout_measure import SHAPES, CollectiveTotal, LayoutResult
from ..console import aligned

MEGABYTE = 1e6
_FROM_SHAPES = (
    "GFLOP are those of the shapes: compilers count none on GPU, and a loop over layers as one."
)
_COLLECTIVES_FROM_SHAPES = (
    "Collectives are those of the layouts' rules where XLA could not write its program as text."
)
_COLUMNS = (
    "layout", "mesh", "params MB", "cache MB", "temp MB",
    "prefill moved MB", "of needed", "turns", "coll.", "sent MB",
    "decode moved MB", "of needed", "turns", "coll.", "sent MB",
    "GFLOP", "compile s", "max diff",
)  # fmt: skip


def table_of(results: Sequence[LayoutResult]) -> str:
    """One line a layout, per device; below it what is wrong with those that cannot be."""
    lines = aligned([_COLUMNS, *map(_row, results)], num_left=2, has_rule=True)
    if any(result.flops_from == SHAPES for result in results):
        lines.append(f"\n{_FROM_SHAPES}")
    if any(result.collectives_from == SHAPES for result in results):
        lines.append(f"\n{_COLLECTIVES_FROM_SHAPES}")
    for result in results:
        if result.findings:
            lines.append(f"\n{result.name}:")
            lines += [f"  {finding}" for finding in result.findings]
    return "\n".join(lines)


def unconditional(result: LayoutResult, phase: str) -> list[CollectiveTotal]:
    """Collectives of one prefill call or one greedy decode step."""
    return [c for c in result.collectives if c.phase == phase and not c.conditional]


def communicated(result: LayoutResult, phase: str) -> tuple[int, float]:
    """How many these are, and what a device sends in them."""
    chosen = unconditional(result, phase)
    return sum(c.count for c in chosen), sum(c.sent_bytes for c in chosen)


def _row(result: LayoutResult) -> tuple[str, ...]:
    mesh = ",".join(f"{axis}={size}" for axis, size in result.mesh.items())
    if result.findings:
        return (result.name, mesh, result.verdict, *[""] * (len(_COLUMNS) - 3))
    numbers = [_megabytes(result.bytes_per_device[key]) for key in ("params", "cache", "temp")]
    for phase in ("prefill", "decode"):
        count, num_bytes = communicated(result, phase)
        numbers += [*_program(result.programs.get(phase)), str(count), _megabytes(num_bytes)]
    difference = "" if result.max_abs_diff is None else f"{result.max_abs_diff:.1e}"
    numbers += [f"{result.flops / 1e9:.1f}", f"{result.compile_seconds:.1f}", difference]
    return (result.name, mesh, *numbers)


def _program(found: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """Cells of a program: the bytes it moves, how many times its need they are, turns of loops."""
    if found is None:
        return "", "", ""
    moved, ratio = _megabytes(found["bytes_moved"]), f"x{found['moved_over_needed']:.2f}"
    return moved, ratio, f"{found['loop_turns']:,}"


def _megabytes(num_bytes: float) -> str:
    megabytes = num_bytes / MEGABYTE
    return (
        f"{megabytes:.2f}"
        if megabytes < 10
        else f"{megabytes:.1f}"
        if megabytes < 1000
        else f"{megabytes:,.0f}"
    )
