"""Format results of layouts as a table for the terminal. Does not know how they were measured."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...compile.layout_measure import SHAPES, CollectiveTotal, LayoutResult
from ..console import align_columns

MEGABYTE = 1e6
_FROM_SHAPES = (
    "GFLOP are computed from shapes: compilers count none on GPU, and count a layer loop once."
)
_COLLECTIVES_FROM_SHAPES = (
    "Collectives are predicted from the layouts' rules where XLA writes no program as text."
)
_COLUMNS = (
    "layout", "mesh", "params MB", "cache MB", "temp MB",
    "prefill moved MB", "of needed", "iterations", "coll.", "sent MB", "GFLOP",
    "decode moved MB", "of needed", "iterations", "coll.", "sent MB", "GFLOP",
    "compile s", "max diff",
)  # fmt: skip


def format_table(results: Sequence[LayoutResult]) -> str:
    """Format a line for each layout, and the findings of failed layouts.

    All figures are those of one device: of a prefill call, and of a decode step.
    """
    lines = align_columns([_COLUMNS, *map(_row, results)], num_left=2, has_rule=True)
    if any(result.flops_from == SHAPES for result in results):
        lines.append(f"\n{_FROM_SHAPES}")
    if any(result.collectives_from == SHAPES for result in results):
        lines.append(f"\n{_COLLECTIVES_FROM_SHAPES}")
    for result in results:
        if result.findings:
            lines.append(f"\n{result.name}:")
            lines += [f"  {finding}" for finding in result.findings]
    return "\n".join(lines)


def unconditional_collectives(result: LayoutResult, phase: str) -> list[CollectiveTotal]:
    """Collectives of one prefill call or one greedy decode step."""
    return [c for c in result.collectives if c.phase == phase and not c.conditional]


def _row(result: LayoutResult) -> tuple[str, ...]:
    mesh = ",".join(f"{axis}={size}" for axis, size in result.mesh.items())
    if result.findings:
        return (result.name, mesh, result.verdict, *[""] * (len(_COLUMNS) - 3))
    numbers = [_megabytes(result.bytes_per_device[key]) for key in ("params", "cache", "temp")]
    for phase in ("prefill", "decode"):
        chosen = unconditional_collectives(result, phase)
        count, num_bytes = sum(c.count for c in chosen), sum(c.sent_bytes for c in chosen)
        numbers += [*_program(result.programs.get(phase)), str(count), _megabytes(num_bytes)]
        numbers.append(f"{result.flops_by_phase[phase] / 1e9:.2f}")
    difference = ""
    if result.agreement:
        difference = f"{result.max_abs_diff:.1e}, {result.agreement}"
    numbers += [f"{result.compile_seconds:.1f}", difference]
    return (result.name, mesh, *numbers)


def _program(program: Mapping[str, Any] | None) -> tuple[str, str, str]:
    """The cells of a program: bytes moved, their ratio to the bytes needed, loop iterations."""
    if program is None:
        return "", "", ""
    moved, ratio = _megabytes(program["bytes_moved"]), f"x{program['moved_over_needed']:.2f}"
    return moved, ratio, f"{program['loop_turns']:,}"


def _megabytes(num_bytes: float) -> str:
    megabytes = num_bytes / MEGABYTE
    return (
        f"{megabytes:.2f}"
        if megabytes < 10
        else f"{megabytes:.1f}"
        if megabytes < 1000
        else f"{megabytes:,.0f}"
    )
