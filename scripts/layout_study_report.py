"""Write the layout study as text and as a picture, from the figures of `layout_study.py`."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

GRAY = "#777777"


def markdown(report: Mapping[str, Any]) -> str:
    lines = [
        "# The layouts of PaLM 540B on 64 chips of TPU v4",
        "",
        f"Predicted from published peaks, not calibrated. Made by `{report['command']}`.",
        "The paper is Pope et al. 2022, 2211.05102.",
        "",
        *_winners(report),
        *_contexts(report),
        *_measured(report),
        *_serial(report),
        *_compiled(report),
        *_differences(report),
    ]
    return "\n".join(lines) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield f"| {' | '.join(columns)} |"
    yield f"|:--|{'--:|' * (len(columns) - 1)}"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"
    yield ""


def _winners(report: Mapping[str, Any]) -> Iterator[str]:
    for phase, swept in report["sweeps"].items():
        tokens = "tokens a call, prompts of 2048" if phase == "prefill" else "rows of 2048 tokens"
        yield f"## {phase}: milliseconds by {tokens}"
        yield ""
        counts = [
            point["rows"] * (2048 if phase == "prefill" else 1)
            for point in next(iter(swept.values()))
        ]
        rows = [
            [name, *(f"{p['seconds'] * 1e3:.1f}" + ("" if p["fits"] else "*") for p in points)]
            for name, points in swept.items()
        ]
        yield from _table(["layout", *map(str, counts)], rows)
        yield "`*` weights and cache do not fit the chips' memory."
        yield ""
        scale = 2048 if phase == "prefill" else 1
        for first, name in report["winners"][phase]:
            yield f"- from {first * scale} on: **{name}**"
        yield ""


def _contexts(report: Mapping[str, Any]) -> Iterator[str]:
    yield "## Longest context with 30% of memory for the cache (paper: table 1)"
    yield ""
    rows = [
        [name, *(f"{ours[rows]} ({report['paper_contexts'][name][rows]})" for rows in ours)]
        for name, ours in report["contexts"].items()
    ]
    yield from _table(["attention", "128 rows (paper)", "512 rows (paper)"], rows)


def _measured(report: Mapping[str, Any]) -> Iterator[str]:
    yield "## Measurements of the paper"
    yield ""
    columns = [
        "graph",
        "layout",
        "weights",
        "paper s",
        "ours s",
        "paper MFU",
        "ours MFU",
        "waits for",
    ]
    rows = []
    for both in report["measured"]:
        paper, ours = both["paper"], both["ours"]
        binds = max(ours["limits"], key=lambda name: ours["limits"][name])
        mfu = "" if paper["mfu"] is None else f"{paper['mfu']:.0%}"
        rows.append(
            [
                f"{paper['phase']} of {paper['rows']} ({paper['source']})",
                paper["layout"],
                paper["weights"],
                f"{paper['seconds']:.4g}",
                f"{ours['seconds']:.4g}",
                mfu,
                f"{ours['mfu']:.0%}",
                binds,
            ]
        )
    yield from _table(columns, rows)
    yield "Our figures have bfloat16 weights throughout. Seconds of decode are those of one step."
    yield ""


def _serial(report: Mapping[str, Any]) -> Iterator[str]:
    serial = report["serial_over_parallel"]
    paper = report["paper_serial_over_parallel"]
    yield "## Serial layers in place of parallel ones"
    yield ""
    yield (
        f"Attention runs before the MLP, and each has its own sum: decode of 512 rows takes "
        f"{serial['decode'] - 1:.0%} longer (paper, section 4.3: {paper - 1:.0%}), prefill of 512 "
        f"rows with weights gathered over all axes {serial['prefill'] - 1:.0%}."
    )
    yield ""


def _compiled(report: Mapping[str, Any]) -> Iterator[str]:
    if not report["compiled"]:
        return
    yield "## Communication of a layer: predicted, and in programs compiled for 64 chips"
    yield ""
    rows = [
        [
            case["layout"],
            case["graph"],
            case["kind"],
            case["axis"],
            f"{case['predicted'] / 1e6:.3f}",
            f"{case['compiled'] / 1e6:.3f}",
        ]
        for case in report["compiled"]
    ]
    columns = ["layout", "graph", "collective", "along", "predicted MB", "compiled MB"]
    yield from _table(columns, rows)


def _differences(report: Mapping[str, Any]) -> Iterator[str]:
    step = next(
        both
        for both in report["measured"]
        if (both["paper"]["rows"], both["paper"]["weights"]) == (64, "bfloat16")
    )
    missing = step["paper"]["seconds"] - step["ours"]["seconds"]
    count = step["ours"]["num_collectives"]
    yield "## Differences, and their reasons"
    yield ""
    of_each = f"{missing / count * 1e6:.0f} us for each"
    yield from (
        "- Context lengths have the same bytes; the paper rounds them.",
        "- Programs never reach peaks: our predictions are bounds. The 16 padding heads of the "
        "model count as work here, and not as use.",
        "- A collective has no fixed cost here. A decode step of 64 rows in bfloat16 has "
        f"{count} collectives; the paper's step takes {missing * 1e3:.1f} ms longer, which is "
        f"{of_each}. Serial layers have more collectives, so their cost is also too low.",
        "- Products, memory and links do not overlap here. The paper's loops of einsums overlap "
        "them, which favours layouts with more communication.",
        "- A mesh axis sends over the dimensions of the torus that it spans, 100 GB/s each "
        "(`hardware.toml`); the paper assumes 270 GB/s for every axis. An all-to-all goes a "
        "quarter of the way round each dimension, so it takes as long over three as over one.",
        "- Attention by batch pads rows to one a chip, so attention by heads is faster for few "
        "rows.",
        "- Our two-dimensional layout splits heads over 16 chips, the paper's over all 64.",
        "- There are no int8 weights here; the paper's low-latency figures use int8 weights.",
    )


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Draw four panels: prefill, its communication, decode, context lengths."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    _draw_prefill(report, panels[0][0])
    _draw_sent(report, panels[0][1])
    _draw_decode(report, panels[1][0])
    _draw_contexts(report, panels[1][1])
    figure.suptitle("PaLM 540B on 64 chips of TPU v4: predicted, and as published (2211.05102)")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_prefill(report: Mapping[str, Any], panel: Any) -> None:
    for name, points in report["sweeps"]["prefill"].items():
        panel.plot([p["rows"] * 2048 for p in points], [p["mfu"] for p in points], "o-", label=name)
    _draw_published(panel, 512 * 2048, 0.76, "paper, XYZ: 76%")
    panel.set(
        xscale="log", xlabel="tokens a prefill call", ylabel="model FLOPS utilisation", ylim=(0, 1)
    )
    panel.set_title("prefill of prompts of 2048 tokens", fontsize=10)
    panel.legend(fontsize=7)


def _draw_sent(report: Mapping[str, Any], panel: Any) -> None:
    layers = 118
    for name, points in report["sweeps"]["prefill"].items():
        sent = [p["sent_bytes"] / layers / 1e9 for p in points]
        panel.plot([p["rows"] * 2048 for p in points], sent, "o-", label=name)
    panel.set(
        xscale="log",
        yscale="log",
        xlabel="tokens a prefill call",
        ylabel="GB sent a chip and layer",
    )
    panel.set_title("what the same calls send", fontsize=10)
    panel.legend(fontsize=7)


def _draw_decode(report: Mapping[str, Any], panel: Any) -> None:
    for name, points in report["sweeps"]["decode"].items():
        rows = [p["rows"] for p in points]
        (line,) = panel.plot(rows, [p["seconds"] * 1e3 for p in points], "-", label=name)
        for fits, marker in ((True, "o"), (False, "x")):
            shown = [p for p in points if p["fits"] == fits]
            xs, ys = [p["rows"] for p in shown], [p["seconds"] * 1e3 for p in shown]
            panel.plot(xs, ys, marker, color=line.get_color())
    measured = [both["paper"] for both in report["measured"]]
    for one in measured:
        if one["phase"] == "decode" and one["weights"] == "bfloat16":
            milliseconds = one["seconds"] * 1e3
            label = f"paper, {one['rows']} rows: {milliseconds:.0f} ms"
            _draw_published(panel, one["rows"], milliseconds, label)
    panel.set(xscale="log", yscale="log", xlabel="rows", ylabel="ms a step")
    panel.set_title("decode after 2048 tokens; x does not fit memory", fontsize=10)
    panel.legend(fontsize=7)


def _draw_published(panel: Any, x: float, y: float, label: str) -> None:
    panel.scatter([x], [y], marker="*", s=140, color="black", zorder=3, label=label)


def _draw_contexts(report: Mapping[str, Any], panel: Any) -> None:
    names = list(report["contexts"])
    for offset, (rows, shade) in enumerate(((128, 1.0), (512, 0.5))):
        at = [i + 0.2 * (2 * offset - 1) - 0.1 for i in range(len(names))]
        ours = [report["contexts"][name][rows] for name in names]
        paper = [report["paper_contexts"][name][rows] for name in names]
        panel.bar(at, ours, 0.2, color="#4c72b0", alpha=shade, label=f"ours, {rows} rows")
        panel.bar(
            [x + 0.2 for x in at], paper, 0.2, color=GRAY, alpha=shade, label=f"paper, {rows} rows"
        )
    panel.set(yscale="log", ylabel="tokens", xticks=range(len(names)))
    panel.set_xticklabels(names, fontsize=8)
    panel.set_title("longest context in 30% of memory", fontsize=10)
    panel.legend(fontsize=7)
