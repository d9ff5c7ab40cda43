"""A plan's report as one HTML page that needs no other file and no network."""

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..counted import counted

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 0.8rem 0; }
td, th { padding: 0.2rem 0.7rem; text-align: right; border-bottom: 1px solid #ddd; }
td:first-child, th:first-child { text-align: left; }
pre { background: #f5f5f5; padding: 0.8rem; overflow-x: auto; }
img { max-width: 100%; display: block; margin: 1rem 0; }
.note { color: #666; }
"""

GRAPHS = (
    "graph", "calls", "tokens real / computed", "predicted ms a call", "waits for", "predicted s",
)  # fmt: skip
COMPARISON = ("grid", "graphs", "prefill padding", "idle slots", "predicted s", "")


@dataclass(frozen=True)
class Picture:
    """A PNG under a title, and in words how to read it."""

    title: str
    reading: str
    png: bytes


def page(report: Mapping[str, Any], pictures: Sequence[Picture]) -> str:
    """The whole page, from the report's JSON and pictures with what they show."""
    predicted, workload, hardware = report["predicted"], report["workload"], report["hardware"]
    body = [
        f"<h1>Plan for {_text(workload['name'])} on {_text(report['target'])}</h1>",
        f"<p>{counted(workload['rows'], 'row')}, "
        f"{counted(workload['prompt_tokens'], 'prompt token')}, "
        f"{counted(workload['expected_output_tokens'], 'expected output token')}."
        f"{_refused(workload['refused'])} Predicted "
        f"<b>{predicted['run_seconds']:.1f} s</b> to run and {predicted['build_seconds']:.0f} s to "
        f"compile {counted(predicted['graphs'], 'graph')}.{_sampled(report['sample'])}</p>",
        f'<p class="note">All figures are predictions but those under Compiled, from '
        f"{_text(report['basis'])} ({_text(hardware['name'])}: {_text(hardware['source'])}).</p>",
        *_compiled(report["compiled"]),
        *map(_picture, pictures),
        *_compiled_layouts(report["compiled_layouts"]),
        "<h2>Graphs</h2>",
        _table(GRAPHS, graph_rows(report["graphs"])),
        *_collectives(report["graphs"]),
        "<h2>Other grids</h2>",
        _table(COMPARISON, compared({"this plan": predicted, **report["comparison"]})),
        "<h2>The plan</h2>",
        f"<pre>{_text(report['plan'])}</pre>",
    ]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>noria plan</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def graph_rows(graphs: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows under `GRAPHS`."""
    return [
        (
            graph["graph"],
            str(graph["calls"]),
            f"{graph['real_tokens']} / {graph['computed_tokens']}",
            f"{graph['seconds'] * 1e3:.1f}",
            graph["binds"],
            f"{graph['total_seconds']:.1f}",
        )
        for graph in graphs
    ]


def compared(grids: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows under `COMPARISON`, of grids by name; the first is what the others are held against."""
    least = next(iter(grids.values()))["run_seconds"]
    return [
        (
            name,
            str(figures["graphs"]),
            f"{figures['prefill_padding']:.1%}",
            f"{figures['idle_slots']:.1%}",
            f"{figures['run_seconds']:.1f}",
            f"x{figures['run_seconds'] / least:.2f}",
        )
        for name, figures in grids.items()
    ]


def _refused(count: int) -> str:
    return f" Left out: {counted(count, 'row')} that no plan can serve." if count else ""


def _sampled(sample: Mapping[str, Any] | None) -> str:
    return f" Of a sample: {_text(sample['error'])}." if sample else ""


def _compiled(compiled: Mapping[str, Any] | None) -> list[str]:
    """What compiling took, where the plan was compiled."""
    if compiled is None:
        return []
    columns = ("compiled graph", "seconds", "MB on each device, with all that it is given")
    rows = [
        (name, f"{graph['seconds']:.1f}", f"{graph['bytes'] / 1e6:.1f}")
        for name, graph in compiled["graphs"].items()
    ]
    return [
        f"<h2>Compiled</h2><p>Measured: {compiled['seconds']:.1f} s for all graphs.</p>",
        _table(columns, rows),
    ]


def _text(value: object) -> str:
    return html.escape(str(value))


def _collectives(graphs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a device sends in a call of each graph, where it sends anything."""
    axes = sorted({axis for graph in graphs for axis in graph["sent_bytes"]})
    if not axes:
        return ["<h2>Collectives</h2><p>Devices send each other nothing in these graphs.</p>"]
    columns = ("graph", *(f"MB along {axis}" for axis in axes), "share of the call's time")
    rows = (
        (
            graph["graph"],
            *(f"{graph['sent_bytes'].get(axis, 0.0) / 1e6:.2f}" for axis in axes),
            f"{graph['network_seconds'] / graph['seconds']:.0%}",
        )
        for graph in graphs
    )
    return [
        "<h2>Collectives</h2><p>What each device sends in one call (of decode, in one step), by "
        "the mesh axes along which it sends.</p>",
        _table(columns, rows),
    ]


def _compiled_layouts(found: Mapping[str, Any]) -> list[str]:
    """Layouts as compiling orders them, where that was asked for."""
    if not found["rows"]:
        return []
    return [
        "<h2>Layouts, compiled</h2><p>Predicted from compiled graphs, the best first; the place "
        "before is the one by shapes alone.</p>",
        _table(found["columns"], found["rows"]),
        *(f"<p>{_text(problem)}</p>" for problem in found["problems"]),
    ]


def _picture(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    return (
        f'<h2>{_text(picture.title)}</h2><p class="note">{_text(picture.reading)}</p>'
        f'<img alt="{_text(picture.title)}" src="data:image/png;base64,{data}">'
    )


def _table(columns: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in columns)
    lines = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{lines}</table>"
