"""Long contexts compiled for TPU slices that are not there: memory, collectives, predicted seconds.

A prefill of 2^20 tokens in the shape of Llama 3 8B, and a decode step over caches of 2^17 tokens in
the shape of Llama 3 70B (2407.21783, table 3), bfloat16. Memory and collectives are those of the
executables; seconds are a roofline: work over published peaks, the slowest of them where all
overlap, their sum where none do.

    python scripts/long_context.py --output benchmarks/long_context.json
"""

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from noria.compile.bucket_grid import BucketGrid, PrefillBucket
from noria.compile.build import compile_graph, plan_graphs
from noria.compile.collectives import read_collectives
from noria.compile.definition import Definition, model_sizes
from noria.compile.planning.hardware import Hardware, hardware_of
from noria.compile.targets import find_target
from noria.modelzoo.blockwise import QUERY_BLOCK
from noria.modelzoo.config import DecoderConfig
from noria.runtime.layout_files import read_layout_table
from noria.runtime.machine import describe_machine
from noria.runtime.planning.hardware_files import known_hardware
from noria.sharding.communication import expected, sent_bytes
from noria.sharding.explain import cache_bytes_per_device, explain
from noria.sharding.layer_call import LayerCall
from noria.sharding.layout import Layout
from noria.sharding.legality import require

BYTES = 2
"""Of a bfloat16."""


WEIGHTS_OVER_BOTH = {
    "name": "ring-2d",
    "mesh": {"sequence": 8, "tensor": 8},
    "rules": {
        "query_heads": "tensor",
        "mlp": "tensor",
        "vocab": ["tensor", "sequence"],
        "embed_in": "sequence",
    },
    "decode": {"rules": {"cache_length": "sequence"}},
}
"""No chip of 16 GB holds an eighth of 70B: weights lie over the ring, too, along embed."""


@dataclass(frozen=True)
class Case:
    """One graph, the phase that it is of, and where it is compiled for."""

    name: str
    phase: str
    target: str
    layout: Layout
    config: DecoderConfig
    rows: int
    length: int
    """Tokens of a prompt, or entries of the cache."""

    @property
    def grid(self) -> BucketGrid:
        prompt = self.length if self.phase == "prefill" else 1024
        return BucketGrid(
            self.length, (PrefillBucket(prompt, self.rows),), self.rows, (self.length,)
        )


def llama3(embed: int, mlp: int, num_query_heads: int, num_layers: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=128256,
        embed=embed,
        mlp=mlp,
        num_query_heads=num_query_heads,
        num_kv_heads=8,
        head_dim=128,
        windows=(None,) * num_layers,
        max_position=1 << 20,
    )


CASES = (
    Case(
        "prefill of 2^20 tokens, Llama 3 8B",
        "prefill",
        "tpu:v5p:4x4x8",
        Layout.from_table(read_layout_table("ring-tensor@sequence=16,tensor=8")),
        llama3(4096, 14336, 32, 32),
        rows=1,
        length=1 << 20,
    ),
    Case(
        "decode step of 16 rows over 2^17 tokens each, Llama 3 70B",
        "decode",
        "tpu:v5e:8x8",
        Layout.from_table(WEIGHTS_OVER_BOTH),
        llama3(8192, 28672, 64, 80),
        rows=16,
        length=1 << 17,
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, help="the same as JSON")
    options = parser.parse_args()
    report = {
        "command": " ".join(["python", *sys.argv]),
        "machine": describe_machine(),
        "chips": {one.name: one.to_table() for one in (chip_of(case) for case in CASES)},
        "cases": [measure(case) for case in CASES],
    }
    print(markdown(report))
    if options.output:
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def chip_of(case: Case) -> Hardware:
    return hardware_of(case.target, known_hardware())


def measure(case: Case) -> dict:
    """Compile one case and read it."""
    target = find_target(case.target)
    require(case.layout, model_sizes(case.config, len(target.devices), case.grid))
    placement = target.placement(case.layout)
    definition = Definition(case.config, placement.arrangement(case.config))
    graphs = plan_graphs(definition, case.grid, placement, jnp.dtype(jnp.bfloat16))
    compiled, seconds, _ = compile_graph(next(g for g in graphs if g.name.startswith(case.phase)))
    weights = weight_bytes(definition, case.layout)
    kept = kept_bytes(case)
    collectives = collectives_of(case, compiled)
    memory = compiled.memory_analysis()
    assert memory is not None, "compilers for TPU say what they allocate"
    return {
        "name": case.name,
        "target": case.target,
        "mesh": case.layout.mesh.sizes,
        "compile_seconds": round(seconds, 1),
        "bytes_per_device": {
            "weights": weights,
            "keys and values": kept,
            "temporaries": memory.temp_size_in_bytes,
            "all": memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes,
        },
        "collectives": collectives,
        "seconds": predict(case, weights, kept, collectives),
    }


def weight_bytes(definition: Definition, layout: Layout) -> int:
    shapes = {name: x.shape for name, x in definition.abstract_parameters(jnp.bfloat16).items()}
    placed = explain(layout, shapes, definition.logical_axes(), jnp.bfloat16)
    return sum(parameter.bytes_per_device for parameter in placed)


def kept_bytes(case: Case) -> int:
    """Keys and values of all rows on one device; what a prefill leaves has a cache's size."""
    return cache_bytes_per_device(case.config, case.layout, case.rows, case.length, jnp.bfloat16)


def collectives_of(case: Case, compiled: jax.stages.Compiled) -> list[dict]:
    """By kind and mesh axes: executions, and bytes that a device sends for them.

    Of prefill what `sharding.communication` says, which tests hold against programs of the same
    layout: libtpu 0.0.51 cannot print this one (an `async-update` of three operands).
    """
    counts: dict[tuple[str, tuple[str, ...]], list[float]] = {}

    def count(kind: str, mesh_axes: tuple[str, ...], num_bytes: int, times: int) -> None:
        total = counts.setdefault((kind, mesh_axes), [0, 0])
        total[0] += times
        total[1] += times * sent_bytes(kind, num_bytes, case.layout.mesh.num_shards(mesh_axes))

    if case.phase == "prefill":
        call = LayerCall(case.phase, case.rows, case.length)
        for one in expected(case.config, case.layout, call, BYTES):
            count(one.kind, one.mesh_axes, one.num_bytes, one.times)
    else:
        for one in read_collectives(compiled.as_text() or "", case.layout.mesh.sizes):
            # what some rows ask for, such as penalties, is no part of a plain step
            if not one.is_conditional:
                count(one.kind, one.mesh_axes, one.num_bytes, one.times)
    return [
        {"kind": kind, "axes": "+".join(mesh_axes), "count": times, "sent_bytes": round(num_bytes)}
        for (kind, mesh_axes), (times, num_bytes) in sorted(counts.items())
    ]


def predict(case: Case, weights: int, kept: int, collectives: list[dict]) -> dict[str, float]:
    """Seconds of work at published peaks.

    Products take two operations a weight and token, attention four an entry of a head and visible
    key. Memory is read for weights and keys once, in prefill keys once a block of queries; a device
    sends over one link at a time, as if neighbours on a mesh axis were neighbours in the torus.
    """
    chip, config = chip_of(case), case.config
    num_devices = case.layout.mesh.num_devices
    is_prefill = case.phase == "prefill"
    tokens = case.rows * (case.length if is_prefill else 1)
    keys = case.length / 2 if is_prefill else case.length
    of_layer = (
        config.embed * config.head_dim * (2 * config.num_query_heads + 2 * config.num_kv_heads)
    )
    of_layer += 3 * config.embed * config.mlp
    heads = config.num_query_heads * config.head_dim
    flops = config.num_layers * tokens * (2 * of_layer + 4 * heads * keys)
    logits = 2 * case.rows * config.embed * config.vocab_size
    # a device meets the keys of the whole ring
    ring = case.layout.mesh.sizes["sequence"]
    blocks = math.ceil(case.length / ring / QUERY_BLOCK)
    key_reads = kept * ring / 2 * blocks if is_prefill else kept
    seconds = {
        "compute": (flops + logits) / num_devices / chip.peak("bfloat16"),
        "memory": (weights + key_reads) / chip.memory_rate,
        "links": sum(one["sent_bytes"] for one in collectives) / chip.link_rate,
    }
    return {**seconds, "overlapped": max(seconds.values()), "one by one": sum(seconds.values())}


def markdown(report: dict) -> str:
    lines = [
        "# Long contexts on slices that are not there",
        "",
        f"Compiled with jax {report['machine']['versions']['jax']}; nothing ran. Made by "
        f"`{report['command']}`.",
        "Seconds are predictions: work over published peaks (`compile/planning/hardware.toml`), as "
        "if neighbours on a mesh axis were neighbours in the torus.",
    ]
    for case in report["cases"]:
        mesh = ", ".join(f"{axis}={size}" for axis, size in case["mesh"].items())
        lines += ["", f"## {case['name']}: `{case['target']}`, {mesh}", ""]
        lines += table(
            "GB a device", {k: f"{v / 1e9:.2f}" for k, v in case["bytes_per_device"].items()}
        )
        lines += ["", "| collective | over | count | GB sent a device |", "|:--|:--|--:|--:|"]
        lines += [
            f"| {c['kind']} | {c['axes']} | {c['count']} | {c['sent_bytes'] / 1e9:.4f} |"
            for c in case["collectives"]
        ]
        lines += ["", *table("seconds", {k: f"{v:.4f}" for k, v in case["seconds"].items()})]
    return "\n".join(lines)


def table(what: str, values: dict[str, str]) -> list[str]:
    """A table of one row."""
    names = " | ".join(values)
    return [
        f"| | {names} |",
        f"|:--|{'--:|' * len(values)}",
        f"| {what} | {' | '.join(values.values())} |",
    ]


if __name__ == "__main__":
    main()
