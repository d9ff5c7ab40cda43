"""Compile long contexts for TPU slices that are not present: memory, collectives, seconds.

The cases are a prefill of 2^20 tokens in the shape of Llama 3 8B, and a decode step over caches of
2^17 tokens in the shape of Llama 3 70B (2407.21783, table 3), in bfloat16. The bytes of weights and
of keys and values follow from shapes and layout, and all other memory is what the executables say.
Collectives come from the executables, or from the layout's rules if libtpu cannot print a program.
Seconds are the predictions of `noria plan`: from the shapes, and from the compiled program.

    python scripts/long_context.py --output benchmarks/long_context.json
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from noria.compile.abstract_model import AbstractModel, model_sizes
from noria.compile.build import compile_with_text, plan_graphs
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.grids.prefill_bucket import PrefillBucket
from noria.compile.hardware.hardware import Hardware, hardware_of
from noria.compile.planning.compiled_call import ProgramCounts, compiled_call
from noria.compile.planning.cost import CostModel
from noria.compile.planning.work import Work
from noria.compile.target_names import TargetName
from noria.compile.targets import find_target
from noria.modelzoo.config import DecoderConfig
from noria.runtime.devices.machine import describe_machine
from noria.runtime.files.hardware_files import known_hardware
from noria.runtime.files.layout_files import read_layout_table
from noria.sharding.call import Call
from noria.sharding.layout import Layout
from noria.sharding.legality import require

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
"""A layout that splits weights over the ring, too, along embed: an eighth of the weights of 70B is
more than the 16 GB of a device."""


@dataclass(frozen=True)
class Case:
    """One graph, with its phase, its model and its target."""

    name: str
    phase: str
    target: str
    layout: Layout
    config: DecoderConfig
    rows: int
    length: int
    """Tokens of a prompt in prefill, or entries of the cache in decode."""

    @property
    def grid(self) -> BucketGrid:
        prompt = self.length if self.phase == "prefill" else 1024
        return BucketGrid(self.length, (PrefillBucket(prompt, self.rows),), self.rows)

    @property
    def call(self) -> Call:
        if self.phase == "prefill":
            return self.grid.prefill[0].call()
        return self.grid.decode_call()


def llama3(embed: int, mlp: int, num_query_heads: int, num_layers: int) -> DecoderConfig:
    return DecoderConfig.alike(
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
    parser.add_argument("--output", type=Path, help="JSON file of the same report")
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
    """Compile one case, and return its figures."""
    target = find_target(case.target)
    require(case.layout, model_sizes(case.config, len(target.devices), case.grid))
    placement = target.placement(case.layout)
    definition = AbstractModel(case.config, placement.arrangement(case.config))
    graphs = plan_graphs(definition, case.grid, placement, jnp.dtype(jnp.bfloat16))
    graph = next(graph for graph in graphs if graph.key.kind == case.phase)
    compiled, text, seconds = compile_with_text(graph)
    memory = compiled.memory_analysis()
    assert memory is not None, "compilers for TPU say what they allocate"
    cost = cost_model(case, definition)
    counted = ProgramCounts.from_executable(
        compiled, text, target.platform, cost, steps=case.grid.steps_per_call
    )
    found, estimate = compiled_call(graph.key, case.call, counted, cost), cost.estimate(case.call)
    return {
        "name": case.name,
        "target": case.target,
        "mesh": case.layout.mesh.sizes,
        "compile_seconds": round(seconds, 1),
        "bytes_per_device": {
            "weights": cost.work.parameter_bytes,
            "keys and values": cost.work.page_bytes(case.rows * case.length),
            "temporaries": memory.temp_size_in_bytes,
            "all": memory.argument_size_in_bytes
            + memory.output_size_in_bytes
            - memory.alias_size_in_bytes
            + memory.temp_size_in_bytes,
        },
        "collectives": [
            {"kind": kind, "axes": "+".join(mesh_axes), "sent_bytes": round(num_bytes)}
            for (kind, mesh_axes), num_bytes in sorted(found.sent.items())
        ],
        "seconds": {
            **{what: seconds for what, seconds in estimate.limits.items() if seconds},
            "of shapes": estimate.seconds,
            "as compiled": found.seconds,
        },
    }


def cost_model(case: Case, definition: AbstractModel) -> CostModel:
    return CostModel(
        Work(definition, "bfloat16", case.layout),
        chip_of(case),
        torus=TargetName.parse(case.target).torus,
    )


def markdown(report: dict) -> str:
    lines = [
        "# Long contexts on slices that are not present",
        "",
        f"Compiled with jax {report['machine']['versions']['jax']}; nothing ran. Made by "
        f"`{report['command']}`.",
        "Seconds are predictions from published peaks (`compile/hardware/hardware.toml`): by "
        "limit, in total from the shapes, and in total from the compiled program.",
    ]
    for case in report["cases"]:
        mesh = ", ".join(f"{axis}={size}" for axis, size in case["mesh"].items())
        lines += ["", f"## {case['name']}: `{case['target']}`, {mesh}", ""]
        lines += table(
            "GB a device", {k: f"{v / 1e9:.2f}" for k, v in case["bytes_per_device"].items()}
        )
        lines += ["", "| collective | over | GB sent a device |", "|:--|:--|--:|"]
        lines += [
            f"| {c['kind']} | {c['axes']} | {c['sent_bytes'] / 1e9:.4f} |"
            for c in case["collectives"]
        ]
        lines += ["", *table("seconds", {k: f"{v:.4f}" for k, v in case["seconds"].items()})]
    return "\n".join(lines)


def table(what: str, values: dict[str, str]) -> list[str]:
    """Return a table of one row."""
    names = " | ".join(values)
    return [
        f"| | {names} |",
        f"|:--|{'--:|' * len(values)}",
        f"| {what} | {' | '.join(values.values())} |",
    ]


if __name__ == "__main__":
    main()
