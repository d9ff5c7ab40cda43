"""Compare the planner with "Efficiently Scaling Transformer Inference", for PaLM 540B.

Pope et al. 2022 (2211.05102) served PaLM 540B on 64 chips of TPU v4. Here the planner's cost model
predicts the fastest of their layouts by batch and phase, and the longest contexts, next to the
paper's published figures. Some graphs, of few layers at full width, are compiled for 64 chips that
are not present, and their communication is compared with the prediction.

    python scripts/layout_study.py --output benchmarks/layout_study

The script writes `.md`, `.json` and `.png`. With `--no-compile` it compiles nothing.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from noria.compile.abstract_model import AbstractModel
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.grid_defaults import GridDefaults, round_up
from noria.compile.hardware.hardware import hardware_of
from noria.compile.layout_measure import MeasuredModel, measure
from noria.compile.planning.cost import CostModel
from noria.compile.planning.work import Work
from noria.compile.target_names import TargetName
from noria.compile.targets import find_target
from noria.modelzoo.config import DecoderConfig
from noria.runtime.files.hardware_files import known_hardware
from noria.runtime.files.layout_files import named_layout_tables
from noria.sharding.call import Call
from noria.sharding.communication import predict_collectives
from noria.sharding.device_bytes import entry_bytes_per_device
from noria.sharding.layout import Layout
from noria.sharding.placement import arrangement_of

sys.path.insert(0, str(Path(__file__).resolve().parent))
from layout_study_report import draw, markdown

TARGET, CHIPS = "tpu:v4:4x4x4", 64
LENGTH, STEPS = 2048, 64
"""Prompt length and number of decode steps (paper, section 4)."""
PARAMETERS = 540.35e9
"""Parameters of PaLM 540B (Chowdhery et al. 2022, 2204.02311), without its padding heads."""
CACHE_SHARE = 0.3
"""Share of a device's memory, for the table of context lengths (paper, table 1)."""

PALM = DecoderConfig.alike(
    vocab_size=256_000,
    embed=18432,
    mlp=73728,
    num_query_heads=64,  # 48, padded (paper, section 4)
    num_kv_heads=1,
    head_dim=256,
    windows=(None,) * 118,
    max_position=1 << 16,
    is_parallel=True,
    tie_embeddings=True,
)
SERIAL = replace(PALM, layers=tuple(replace(x, is_parallel=False) for x in PALM.layers))
MULTIHEAD = PALM.map_attention(lambda x: replace(x, num_kv_heads=64, head_dim=128))


def layout(name: str, mesh: Mapping[str, int], **phases: Mapping[str, Any]) -> Layout:
    """Return a named layout on 64 chips; split heads get copies of the one key/value head.

    Args:
        name: Name of the layout.
        mesh: Sizes of the mesh axes.
        phases: Rules by phase, in addition to the layout's own.
    """
    table = dict(named_layout_tables()[name])
    table["mesh"] = dict(mesh)
    table["rules"] = {**table["rules"], "kv_heads": ""}
    for phase, rules in phases.items():
        table[phase] = {"rules": {**table.get(phase, {}).get("rules", {}), **rules}}
    return Layout.from_table(table)


LINE, PLANES, FLIPPED = {"tensor": 64}, {"data": 4, "tensor": 16}, {"data": 16, "tensor": 4}
BY_HEADS, BY_BATCH = {"attention_batch": ""}, {"attention_batch": ["data", "tensor"]}
PREFILL = {
    "weight-stationary 1D": layout("weight-stationary-1d-batch-attention", LINE),
    "weight-stationary 2D": layout(
        "weight-stationary-2d", PLANES, prefill=BY_HEADS, decode=BY_BATCH
    ),
    "weight-gathered X": layout("weight-gathered", PLANES, decode=BY_BATCH),
    "weight-gathered XY": layout("weight-gathered", FLIPPED, decode=BY_BATCH),
    "weight-gathered XYZ": layout("weight-gathered-all", PLANES, decode=BY_BATCH),
}
"""Layouts of prefill. In decode, each splits attention by batch, and so also its cache."""
DECODE = {
    "1D, attention by heads": layout("weight-stationary-1d-kv-copies", LINE),
    "1D, attention by batch": layout("weight-stationary-1d-batch-attention", LINE),
    "2D, attention by heads": layout("weight-stationary-2d", PLANES, decode=BY_HEADS),
    "2D, attention by batch": layout("weight-stationary-2d", PLANES, decode=BY_BATCH),
}
CONTEXTS = {
    "multihead, by heads": (MULTIHEAD, DECODE["1D, attention by heads"]),
    "multiquery, by heads": (PALM, DECODE["1D, attention by heads"]),
    "multiquery, by batch": (PALM, DECODE["1D, attention by batch"]),
}
ROWS = {"prefill": [1 << i for i in range(10)], "decode": [1 << i for i in range(11)]}

PAPER_CONTEXTS = {
    "multihead, by heads": {128: 1320, 512: 330},
    "multiquery, by heads": {128: 660, 512: 165},
    "multiquery, by batch": {128: 43_000, 512: 10_700},
}
"""The longest contexts by batch (paper, table 1)."""


@dataclass(frozen=True)
class Published:
    """A measurement of the paper."""

    phase: str
    rows: int
    layout: str
    weights: str
    seconds: float
    """Seconds of the prefill call, or of one decode step."""
    mfu: float | None
    source: str


_XYZ, _2D = "weight-gathered XYZ", "2D, attention by batch"
PAPER = (
    Published("prefill", 512, _XYZ, "bfloat16", 85.2, 0.76, "table 2"),
    Published("decode", 512, _2D, "bfloat16", 6.0 / STEPS, 0.33, "table 2"),
    Published("decode", 64, _2D, "bfloat16", 0.0369, None, "section 4.4"),
    Published("prefill", 1, "weight-stationary 2D", "int8", 0.29, 0.43, "table 2"),
    Published("decode", 64, _2D, "int8", 1.82 / STEPS, 0.14, "table 2"),
)
PAPER_SERIAL = 1.14
"""Ratio of a decode step's seconds with serial layers to parallel ones, 512 rows (section 4.3)."""


class Planner:
    """Predicts the seconds of calls by layout; traces each definition once."""

    def __init__(self):
        self._definitions: dict[object, AbstractModel] = {}

    def cost(self, config: DecoderConfig, of: Layout) -> CostModel:
        arrangement = arrangement_of(of, "tpu", config)
        if (config, arrangement) not in self._definitions:
            self._definitions[config, arrangement] = AbstractModel(config, arrangement)
        work = Work(self._definitions[config, arrangement], "bfloat16", of)
        torus = TargetName.parse(TARGET).torus
        return CostModel(work, hardware_of(TARGET, known_hardware()), torus=torus)

    def judge(self, config: DecoderConfig, of: Layout, phase: str, rows: int) -> dict[str, Any]:
        """Return a call's seconds, their limits, and its use of the chips (paper, section 2)."""
        defaults, cost = GridDefaults.for_layout(of), self.cost(config, of)
        multiple = defaults.batch_multiple if phase == "prefill" else defaults.slot_multiple
        filled = round_up(rows, multiple)
        call = Call("prefill", filled, LENGTH, LENGTH)
        if phase == "decode":
            call = Call("decode", filled, 1, LENGTH, entries=filled * LENGTH)
        estimate, tokens = cost.estimate(call), rows * (LENGTH if phase == "prefill" else 1)
        needed = cost.work.parameter_bytes + cost.work.page_bytes(
            round_up(rows, defaults.slot_multiple) * (LENGTH + STEPS)
        )
        peak = CHIPS * cost.hardware.peak("bfloat16")
        return {
            "rows": rows,
            "seconds": estimate.seconds,
            "limits": dict(estimate.limits),
            "mfu": 2 * PARAMETERS * tokens / peak / estimate.seconds,
            "sent_bytes": sum(sum(part.sent.values()) for part in cost.work.parts(call)),
            "num_collectives": sum(
                one.times for one in predict_collectives(config, of, call, itemsize=2)
            ),
            "fits": needed <= cost.hardware.memory_bytes,
            "bytes_per_device": needed,
        }


def sweep(planner: Planner, phase: str, layouts: Mapping[str, Layout]) -> dict[str, list[dict]]:
    return {
        name: [planner.judge(PALM, of, phase, rows) for rows in ROWS[phase]]
        for name, of in layouts.items()
    }


def winners(swept: Mapping[str, Sequence[dict]]) -> Iterator[tuple[int, str]]:
    """Yield the batches from which on another layout is the fastest that fits, and its name."""
    best = None
    for points in zip(*swept.values(), strict=True):
        fitting = {name: p for name, p in zip(swept, points, strict=True) if p["fits"]}
        name = min(fitting, key=lambda name: fitting[name]["seconds"]) if fitting else None
        if name is not None and name != best:
            best = name
            yield points[0]["rows"], name


def contexts() -> dict[str, dict[int, int]]:
    """Return the longest contexts whose cache fits its share of memory."""
    share = int(CACHE_SHARE * hardware_of(TARGET, known_hardware()).memory_bytes)
    return {
        name: {rows: int(share / (rows * entry_bytes(*of))) for rows in (128, 512)}
        for name, of in CONTEXTS.items()
    }


def entry_bytes(config: DecoderConfig, layout: Layout) -> float:
    """Return the bytes of a position of a row in the cache of all layers, on one device."""
    return sum(entry_bytes_per_device(x, layout, jnp.bfloat16) for x in config.attentions)


def compiled_layers() -> list[dict[str, Any]]:
    """Compare the predicted communication of a layer with compiled programs at full width."""
    grid, target = BucketGrid(LENGTH, ((LENGTH, 64),), 512), find_target(TARGET)
    name, measured = "weight-stationary 2D", MeasuredModel(PALM.first_layers(2), grid, jnp.bfloat16)
    result = measure(measured, PREFILL[name], target, on_graph=note)
    if result.findings:
        raise SystemExit(" ".join(result.findings))
    return [
        {
            "layout": name,
            "graph": "prefill of 64 rows" if one.phase == "prefill" else "decode of 512 rows",
            "kind": one.kind,
            "axis": one.axis,
            "predicted": one.formula_bytes_per_layer,
            "compiled": one.bytes_per_layer,
        }
        for one in result.collectives
        if one.bytes_per_layer and not one.conditional
    ]


def note(graph: str, seconds: float) -> None:
    print(f"compiled {graph} in {seconds:.0f} s", file=sys.stderr, flush=True)


def study(options: argparse.Namespace) -> dict[str, Any]:
    planner = Planner()
    swept = {
        "prefill": sweep(planner, "prefill", PREFILL),
        "decode": sweep(planner, "decode", DECODE),
    }
    by_name = PREFILL | DECODE
    beside = []
    for one in PAPER:
        ours = planner.judge(PALM, by_name[one.layout], one.phase, one.rows)
        beside.append({"paper": vars(one), "ours": ours})
    serial = {
        phase: planner.judge(SERIAL, by_name[name], phase, rows)["seconds"]
        / planner.judge(PALM, by_name[name], phase, rows)["seconds"]
        for phase, name, rows in (
            ("decode", "2D, attention by batch", 512),
            ("prefill", "weight-gathered XYZ", 512),
        )
    }
    hardware = hardware_of(TARGET, known_hardware())
    return {
        "command": " ".join(["python", *sys.argv]),
        "hardware": {"name": hardware.name, **hardware.to_table()},
        "sweeps": swept,
        "winners": {phase: list(winners(of)) for phase, of in swept.items()},
        "contexts": contexts(),
        "paper_contexts": PAPER_CONTEXTS,
        "measured": beside,
        "serial_over_parallel": serial,
        "paper_serial_over_parallel": PAPER_SERIAL,
        "compiled": [] if options.no_compile else compiled_layers(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True, help="path without suffix")
    parser.add_argument("--no-compile", action="store_true", help="only predict")
    options = parser.parse_args()
    report = study(options)
    write = options.output.with_suffix
    write(".json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    write(".md").write_text(markdown(report), encoding="utf-8")
    draw(report, write(".png"))


if __name__ == "__main__":
    main()
