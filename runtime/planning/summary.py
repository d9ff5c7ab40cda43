"""Render the report of a plan as text for the terminal.

All seconds are predictions. *Predicted* seconds are those of the run, without the build.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ..console import GIGABYTE, align_columns, plural
from .layout_table import layout_name, ranked_lines

GRAPHS = (
    "graph", "calls", "tokens real / computed", "predicted ms a call", "waits for", "predicted s",
)  # fmt: skip
COMPILED_LAYOUTS = (
    "layout", "build + run s", "as compiled s", "rank before", "prefill, ms a call",
    "decode, ms a step", "MB sent in them", "needs GB",
)  # fmt: skip
PROGRAMS = (
    "compiled graph", "GB moved", "of needed", "loop iterations", "GB converted", "GB copied",
    "Mcycles",
)  # fmt: skip
PEAKS_NOTE = "runs took 1.5 to 2 times as long where they were measured"
SIZES = {
    "slots": "slots",
    "prompts_per_call": "prompts a call",
    "chunk": "tokens of a chunk",
    "chunks_per_call": "chunks a call",
}
"""The sizes that a search chooses, in `search` of a report, and what the summary calls them."""
MAX_SIZES = 16
"""The largest number of sizes that the summary lists."""
COMPARISON = ("grid", "graphs", "prefill padding", "idle slots", "predicted s", "")


def summary(report: Mapping[str, Any]) -> str:
    """The summary of a report, from the content of report.json."""
    workload, hardware, predicted = report["workload"], report["hardware"], report["predicted"]
    search, refused = report["search"], plural(workload["refused"], "row")
    lacks = "this plan cannot serve" if report["choice"] else "no plan can serve"
    other = " than the planner's own" if report["choice"] else ""
    ranked = ranked_lines(report["layouts"]) if len(report["layouts"]) > 1 else []
    lines = [
        f"workload   {workload['name']}: {plural(workload['rows'], 'row')}, "
        f"{plural(workload['prompt_tokens'], 'prompt token')}, "
        f"{plural(workload['expected_output_tokens'], 'expected output token')}"
        + (f"; left out: {refused} that {lacks}" if workload["refused"] else ""),
        f"target     {report['target']} ({hardware['name']})",
        *_layout_lines(report),
        *([f"limit      {report['limit']}"] if report["limit"] else []),
        "",
        *align_columns(_graphs(report["graphs"])),
        "",
        *align_columns([COMPARISON, *_compared({"this plan": predicted, **report["comparison"]})]),
        "",
        *([*ranked, ""] if ranked else []),
        *_compiled_layout_lines(report["layouts"]),
        *_program_lines(report["graphs"]),
        f"predicted  {predicted['run_seconds']:.1f} s to run and "
        f"{predicted['build_seconds']:.0f} s to compile {plural(predicted['graphs'], 'graph')}"
        f"{_slots(predicted)}",
        f"rates      {_rates(report['evidence'])}",
        f"evidence   {_evidence(report['evidence']['costs'])}",
        *([f"sample     {report['sample']['error']}"] if report["sample"] else []),
        *_shared_lines(report),
        f"memory     {_gigabytes(report['memory_bytes'], predicted)}",
        *([] if predicted["pages"] is None else [f"pages      {held_pages(report)}"]),
        *_choice_lines(report["choice"], predicted["run_seconds"]),
        *_search_lines(search, other),
    ]
    return "\n".join(lines)


def _search_lines(search: Mapping[str, Any], other: str) -> list[str]:
    """The size of the search, the share that the rest of it might save, and its limits."""
    layouts = f"{plural(search['layouts'], 'layout')}, " if search["layouts"] > 1 else ""
    sizes = [
        f"{label} other than {_sizes(search['sizes'][name])}"
        for name, label in SIZES.items()
        if search["sizes"][name]
    ]
    return [
        f"search     {layouts}{search['simulated']} of {plural(search['candidates'], 'grid')} "
        f"simulated; none of the others can be more than {search['gap']:.1%} faster to build and "
        f"run{other}; {search['seconds']:.1f} s",
        f"outside    not searched, except next to the best grid: {'; '.join(sizes)}",
    ]


def _sizes(sizes: Sequence[int]) -> str:
    """Sizes in growing order; of many, how many there are."""
    if len(sizes) <= MAX_SIZES:
        return ", ".join(map(str, sizes))
    return f"{len(sizes)} numbers from {sizes[0]} to {sizes[-1]}"


def held_pages(report: Mapping[str, Any]) -> str:
    """The pages that rows hold at most, and what their lack costs."""
    held, pages = report["held"], report["predicted"]["pages"]
    return (
        f"rows hold at most {held['pages']} of {plural(pages, 'page')} "
        f"({held['pages'] / pages:.1%}); {plural(held['waits'], 'wait')} for pages, "
        f"{plural(held['replays'], 'replay')}"
    )


def _choice_lines(choice: Mapping[str, Any] | None, run_seconds: float) -> list[str]:
    """The cost of a given plan beside the planner's own, and the keys in which they differ."""
    if choice is None:
        return []
    if not choice["differences"]:
        return ["choice     the planner chooses the same buckets"]
    share = run_seconds / choice["run_seconds"] - 1
    compared = f"{abs(share):.1%} {'more' if share >= 0 else 'less'}"
    changes = [
        f"           buckets.{key}: {_value(given)} here, {_value(own)} there"
        for key, (given, own) in choice["differences"].items()
    ]
    return [
        f"choice     this plan takes {compared} to run than the planner's own "
        f"({choice['run_seconds']:.1f} s), from which it differs in",
        *changes,
    ]


def _value(value: Any) -> str:
    """The value of a key of a plan; `none` for one that is left out."""
    return "none" if value is None else json.dumps(value)


def _shared_lines(report: Mapping[str, Any]) -> list[str]:
    """The prompt tokens that are not computed, because rows share prefixes."""
    if not (saved := report["shared_prefixes"]["saved_tokens"]):
        return []
    share = saved / report["workload"]["prompt_tokens"]
    return [f"shared     {saved} prompt tokens ({share:.1%}) are not computed again"]


def _graphs(graphs: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The table of graphs, with the bytes that a device sends in a call along each mesh axis."""
    axes = sorted({axis for graph in graphs for axis in graph["sent_bytes"]})
    sent = [f"MB sent along {axis}" for axis in axes]
    rows = [
        (
            graph["graph"] + (f", {plural(graph['steps'], 'step')}" if "steps" in graph else ""),
            str(graph["calls"]),
            f"{graph['real_tokens']} / {graph['computed_tokens']}",
            f"{graph['seconds'] * 1e3:.1f}",
            graph["binds"],
            f"{graph['total_seconds']:.1f}",
            *(f"{graph['sent_bytes'].get(axis, 0.0) / 1e6:.2f}" for axis in axes),
        )
        for graph in graphs
    ]
    return [(*GRAPHS, *sent), *rows]


def _compared(grids: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Rows of the table `COMPARISON`; the last cell is the ratio of seconds to the first grid's."""
    reference = next(iter(grids.values()))["run_seconds"]
    return [
        (
            name,
            str(figures["graphs"]),
            f"{figures['prefill_padding']:.1%}",
            f"{figures['idle_slots']:.1%}",
            f"{figures['run_seconds']:.1f}",
            f"x{figures['run_seconds'] / reference:.2f}",
        )
        for name, figures in grids.items()
    ]


def _rates(evidence: Mapping[str, Any]) -> str:
    """The rates of the run, and the price of build and run if the hardware has one."""
    rates = (
        f"{evidence['output_tokens_per_second']:,.0f} output tokens/s and "
        f"{evidence['rows_per_hour']:,.0f} rows an hour while it runs"
    )
    if evidence["price"] is None:
        return rates
    return f"{rates}; price {evidence['price']:.4g} with the build"


def _evidence(costs: str) -> str:
    """The evidence of the seconds, and what it is worth."""
    return f"{costs}: {PEAKS_NOTE}" if "peaks" in costs else costs


def _slots(predicted: Mapping[str, Any]) -> str:
    """The occupancy of the slots; empty if the grid has no slots."""
    if not predicted["decode_slots"]:
        return ""
    return f"; slots {predicted['occupancy']:.1%} full, {predicted['tail_seconds']:.1f} s of tail"


def _layout_lines(report: Mapping[str, Any]) -> list[str]:
    if report["layout"] is None:
        return []
    ranked = sum(layout["rank"] is not None for layout in report["layouts"])
    rank = f", the best of {ranked}" if ranked > 1 else ""
    return [f"layout     {report['layout']}{rank}"]


def _compiled_layout_lines(searched: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of compiled layouts, the fastest first; empty if no layout was compiled."""
    compiled = [one for one in searched if one.get("compiled") or one.get("problem")]
    if not compiled:
        return []
    by_shapes = sorted(compiled, key=lambda layout: layout["seconds"])
    rows = [_compiled_layout(layout, by_shapes.index(layout) + 1) for layout in compiled]
    pairs = zip(rows, compiled, strict=True)
    notes = [f"{row[0]}: {note}" for row, layout in pairs for note in _compiled_notes(layout)]
    return [*align_columns([COMPILED_LAYOUTS, *rows]), *notes, ""]


def _compiled_notes(layout: Mapping[str, Any]) -> list[str]:
    """The reason why a layout cannot run, or how its graphs differ from their shapes."""
    if layout["problem"]:
        return [layout["problem"]]
    return [call["difference"] for call in layout["compiled"].values() if call["difference"]]


def _compiled_layout(layout: Mapping[str, Any], rank: int) -> tuple[str, ...]:
    """A row of the table `COMPILED_LAYOUTS`."""
    calls = [layout["compiled"].get(phase) for phase in ("prefill", "decode")]
    known = [call for call in calls if call is not None]
    return (
        layout_name(layout),
        f"{layout['seconds']:.4g}",
        "cannot run" if layout["problem"] else f"{layout['compiled_seconds']:.4g}",
        str(rank),
        *("" if call is None else f"{call['seconds'] * 1e3:.1f}" for call in calls),
        " + ".join(f"{sum(call['sent'].values()) / 1e6:.1f}" for call in known),
        f"{max((call['memory_bytes'] for call in known), default=0) / GIGABYTE:.2f}",
    )


def _program_lines(graphs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of compiled programs; empty if no graph was compiled."""
    rows = [_program(graph["graph"], graph["compiled"]) for graph in graphs if graph["compiled"]]
    return [*align_columns([PROGRAMS, *rows]), ""] if rows else []


def _program(name: str, program: Mapping[str, Any]) -> tuple[str, ...]:
    """A row of the table `PROGRAMS`."""
    return (
        name,
        f"{program['bytes_moved'] / GIGABYTE:.3f}",
        f"x{program['bytes_moved'] / program['bytes_needed']:.2f}",
        f"{program['loop_turns']:,.0f}",
        f"{program['converted_bytes'] / GIGABYTE:.3f}",
        f"{program['copied_bytes'] / GIGABYTE:.3f}",
        f"{program['cycles'] / 1e6:.1f}" if program["cycles"] else "",
    )


def _gigabytes(memory: Mapping[str, float], predicted: Mapping[str, Any]) -> str:
    weights, cache, device = (memory[part] / GIGABYTE for part in ("weights", "cache", "device"))
    pages = ""
    if predicted["pages"] is not None:
        pages = f" ({plural(predicted['pages'], 'page')} of {predicted['page']} entries)"
    return (
        f"weights {weights:.2f} GB and cache {cache:.2f} GB{pages} of {device:.1f} GB on each "
        f"device"
    )
