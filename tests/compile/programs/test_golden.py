"""Programs of small models against upper bounds in one table.

The cases cover most pairs of archetype, layout, form of layers, graph and target.
"""

import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from noria.compile.abstract_model import AbstractModel
from noria.compile.build import compile_with_text, plan_graphs
from noria.compile.grids.bucket_grid import BucketGrid
from noria.compile.planning.evidence import Evidence
from noria.compile.planning.work import ONE_DEVICE, Work
from noria.compile.programs.report import read_report
from noria.compile.targets import find_target
from noria.modelzoo.families.registry import from_hf_config
from noria.runtime.files.layout_files import read_layout_table
from noria.sharding.layout import Layout

TABLE = tomllib.loads(Path(__file__).with_name("golden_programs.toml").read_text("utf-8"))
ROWS = TABLE["program"]
TABLES = {TABLE["jax"]: ROWS, TABLE["newest_jax"]: TABLE["newest_program"]}
"""Rows of the table by the version of jax."""
LIBTPU = TABLE["libtpu"]
INSTALLED = next((found.version for found in metadata.distributions(name="libtpu")), "")
ON_TPU = [
    pytest.mark.tpu_compile,
    pytest.mark.skipif(
        not INSTALLED.startswith(f"{LIBTPU}."), reason=f"rows for TPUs hold for libtpu {LIBTPU}"
    ),
]
FACTS = ("model", "target", "layout", "layers", "dtype", "graph")
SLOW = {
    "dense tpu:v5e:2x2 weight-stationary-1d@tensor=4 unrolled bfloat16 prefill",
    "windows tpu:v6e:2x2 weight-stationary-1d@tensor=4 unrolled bfloat16 decode",
    "latents tpu:v5e:2x2 data-tensor@data=2,tensor=2 scanned bfloat16 decode",
    "experts tpu:v6e:2x2 expert-tensor@data=1,expert=2,tensor=2 scanned bfloat16 decode",
    "sinks tpu:v5e:2x2 weight-stationary-1d@tensor=4 scanned bfloat16 prefill",
}
"""Rows whose pairs of facts meet in other rows."""
ARRAY_BYTES = 64 * 1024
"""Bytes of the smallest argument whose conversions and copies count: these models are small."""
SLACK = 1.05
LEAST_TURN_KB = 64
GRID = BucketGrid(256, ((128, 4),), 32, row_tokens=1, steps_per_call=4)
SHARED = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama"},
    "windows": {
        "model_type": "gemma3_text",
        "hidden_act": "gelu_pytorch_tanh",
        "num_hidden_layers": 4,
        "sliding_window": 96,
        "sliding_window_pattern": 2,
    },
    "latents": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 8,
        "head_dim": 64,
        "q_lora_rank": 256,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 256,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
        "n_group": 4,
        "topk_group": 2,
        "norm_topk_prob": True,
    },
    "experts": {
        "model_type": "qwen3_moe",
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "norm_topk_prob": True,
    },
    "sinks": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": 96,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 256,
            "truncate": False,
        },
    },
}


def name_of(row: dict[str, Any]) -> str:
    return " ".join(row[fact] for fact in FACTS)


def read(row: dict[str, Any]) -> Evidence:
    """Compile the program of a row, and read it."""
    config = from_hf_config(SHARED | MODELS[row["model"]]).config
    layout = None
    if row["layout"]:
        layout = Layout.from_table(read_layout_table(row["layout"]))
    target, is_decode = find_target(row["target"]), row["graph"] == "decode"
    placement = target.placement(layout)
    definition = AbstractModel(config, placement.arrangement(config, row["layers"] == "scanned"))
    graphs = plan_graphs(definition, GRID, placement, jnp.dtype(row["dtype"]))
    (graph,) = (graph for graph in graphs if graph.key.kind == row["graph"])
    _, text, _ = compile_with_text(graph)
    assert text is not None
    work = Work(definition, row["dtype"], layout or ONE_DEVICE)
    mesh = dict(placement.mesh.shape)
    report = read_report(text, target.platform, mesh, min_bytes=ARRAY_BYTES)
    call = GRID.decode_call() if is_decode else GRID.prefill[0].call()
    return Evidence(report, work.needed(call))


def found_in(evidence: Evidence) -> dict[str, float]:
    """Return the figures of a program in the form of a row."""
    step, once = evidence.report.step, evidence.report.once
    figures = {
        "moved": evidence.ratio,
        "once": once.bytes_moved / 1e6,
        "turns": step.loop_turns,
        "converted": (step.converted_bytes + once.converted_bytes) / 1e6,
        "copied": (step.copied_bytes + once.copied_bytes) / 1e6,
    }
    smallest = evidence.report.smallest_turn
    return figures | ({} if smallest is None else {"turn_kb": smallest / 1024})


def row_lines(row: dict[str, Any], figures: dict[str, float]) -> str:
    """Return the text of a row."""
    facts = [f'{fact} = "{row[fact]}"' for fact in FACTS]
    found = [f"{name} = {round(number, 3):g}" for name, number in figures.items()]
    return "\n".join(["[[program]]", *facts, *found])


@pytest.mark.skipif(jax.__version__ not in TABLES, reason=f"tables hold for jax {list(TABLES)}")
@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            row,
            id=name_of(row),
            marks=[
                *(ON_TPU if row["target"].startswith("tpu") else []),
                *[pytest.mark.slow] * (name_of(row) in SLOW),
            ],
        )
        for row in TABLES.get(jax.__version__, ROWS)
    ],
)
def test_a_program_does_no_more_than_its_row_allows_and_a_row_allows_no_more_than_that(row):
    figures = found_in(read(row))
    now = row_lines(row, figures)
    assert figures.keys() == row.keys() - set(FACTS), now
    for name, number in figures.items():
        least, most = sorted((round(number, 3), row[name]))
        # values may differ from the row a little, in both directions
        assert most <= least * SLACK + 0.001, f"{name} is {number:.3f}, allowed {row[name]}\n{now}"


@pytest.mark.skipif(jax.__version__ != TABLE["jax"], reason="each jax brings another libtpu")
def test_rows_for_tpus_hold_for_the_libtpu_that_the_extra_brings():
    assert any(f"libtpu=={LIBTPU}.*" in line for line in metadata.requires("jax") or [])


def test_most_pairs_of_facts_meet():
    """Each model has a case of every run with each target, graph and form of layers."""
    often = [row for row in ROWS if name_of(row) not in SLOW]
    assert len(often) == len(ROWS) - len(SLOW)
    for fact, values in (
        ("target", {"cpu", "tpu:v5e:2x2", "tpu:v6e:2x2"}),
        ("graph", {"decode", "prefill"}),
        ("layers", {"unrolled", "scanned"}),
    ):
        for model in MODELS:
            assert {row[fact] for row in often if row["model"] == model} == values


def test_each_program_for_the_cpu_is_held_with_the_newest_jax_too():
    named = [name_of(row) for row in ROWS if row["target"] == "cpu"]
    assert [name_of(row) for row in TABLE["newest_program"]] == named


def test_every_turn_of_a_loop_in_decode_on_tpu_is_worth_one():
    """No loop of decode on TPU runs over single slots or tokens."""
    decode = [row for row in ROWS if row["graph"] == "decode" and row["target"].startswith("tpu")]
    assert all(row.get("turn_kb", LEAST_TURN_KB) >= LEAST_TURN_KB for row in decode)
