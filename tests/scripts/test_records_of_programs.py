"""Scripts that make records of programs for absent TPUs run on small models, with small tables."""

import json
import re
from dataclasses import replace

import pytest
from numerics_helpers import script

from noria.modelzoo.config import DecoderConfig
from noria.runtime.files.layout_files import read_layout_table
from noria.sharding.layout import Layout

pytestmark = pytest.mark.tpu_compile
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TARGET, LAYOUT = "tpu:v5e:2x2", "weight-stationary-1d@tensor=4"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a model, which has no weights."""
    folder = tmp_path_factory.mktemp("models")
    (folder / "small").mkdir()
    (folder / "small" / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_figures_of_a_graph_are_printed_and_its_text_is_read_again(run, models, tmp_path):
    model = ("--model", models / "small", "--layout", LAYOUT, "--slots", 8, "--length", 256)
    grid = ("--prefill", "128x2", "--graphs", "decode")
    arguments = ("--target", TARGET, *grid, "--keep", tmp_path)
    said = run("read_graphs.py", *model, *arguments)
    assert "decode, compiled in" in said and "moved (line, operation" in said
    text = ("--text", tmp_path / "decode.txt", "--mesh", "tensor=4", "--json")
    again = json.loads(run("read_graphs.py", "--target", TARGET, *text))["decode.txt"]
    assert f"bytes_moved: {again['bytes_moved']}\n" in said


def test_graphs_of_models_are_kept_by_label_and_case(run, models, tmp_path):
    output = tmp_path / "compiled"
    table = script("scripts/compiled_table.py")
    shape = table.Shape(8, 256, (128, 2))
    targets = dict.fromkeys(("v5e:2x2", "v6e:2x2", "v5p:2x2x1"), LAYOUT)
    constants = {"MODELS": models, "PLACES": (("small", shape, targets),), "UNROLLED_LAYERS": 1}
    arguments = ("--output", output, "--label", "one", "--only", "v5e:2x2, 1 layers")
    run("compiled_table.py", *arguments, **constants)
    cases = json.loads(output.with_suffix(".json").read_text())["labels"]["one"]["cases"]
    names = [
        f"small, {TARGET}, 1 layers, {call}" for call in ("decode 8 slots of 256", "prefill 128x2")
    ]
    assert list(cases) == names and all("temp_bytes" in case for case in cases.values())
    assert names[0] in output.with_suffix(".md").read_text()
    # what is in the record is not compiled again
    assert run("compiled_table.py", *arguments, **constants, measured=None) == ""


def test_bytes_with_codes_are_those_moved_and_needed(run, models, tmp_path):
    output = tmp_path / "numbers"
    table = script("scripts/compiled_numbers.py")
    cases = table.cases("small", 8, 1, (TARGET, LAYOUT))
    constants = {"MODELS": models, "CASES": cases, "LENGTH": 512}
    run("compiled_numbers.py", "--output", output, "--only", "int8", **constants)
    (found,) = json.loads(output.with_suffix(".json").read_text())["cases"].values()
    assert found["moved"] >= found["needed"] > 0
    page = output.with_suffix(".md").read_text()
    assert f"| {cases[0].name} | {LAYOUT} |" in page and f"- {cases[1].name}" in page


def test_every_graph_of_a_plan_is_compiled_and_formats_are_compared(run, models, tmp_path):
    output, workload = tmp_path / "plans", tmp_path / "rows.csv"
    workload.write_text("prompt_tokens,output_tokens\n" + "100,20\n" * 20)
    plans = script("scripts/compile_whole_plans.py")
    case = plans.Case("small", TARGET, LAYOUT)
    constants = {
        "MODELS": models,
        "WORKLOAD": workload,
        "CASES": (case,),
        "LADDERS": {"small": (TARGET,)},
    }
    run("compile_whole_plans.py", "--output", output, **constants)
    report = json.loads(output.with_suffix(".json").read_text())
    found = report["cases"][case.name]
    assert found["is_done"] and all("all_bytes" in graph for graph in found["graphs"].values())
    assert set(report["formats"]["small"]) == {f"{TARGET}, bfloat16", f"{TARGET}, int8"}
    assert f"| {case.name} |" in output.with_suffix(".md").read_text()


def test_time_of_prefill_is_by_kind_of_work(run, models):
    constants = {"MODEL": str(models / "small"), "LAYERS": 1, "CALLS": ((128, 2),)}
    places = {"ALONE": ("tpu:v5e:1x1",), "SPLIT": (TARGET,), "LAYOUTS": (LAYOUT,)}
    said = run("prefill_table.py", **constants, **places)
    assert re.search(r"\| tpu:v5e:1x1 \|  \| 128x2 \| [\d.]+ \|( [\d.]+ \(\d+%\) \|){4}", said)
    assert f"| {TARGET} | {LAYOUT} | 128x2 |" in said


def test_efficiency_is_the_share_of_the_peaks_by_kind_of_graph(run, models):
    efficiency = script("scripts/tpu_efficiency.py")
    constants = {
        "TARGETS": ("tpu:v5e:1x1",),
        "CASES": (("decode", 8),),
        "FEW": 1,
        "MORE": 2,
        "read_config": lambda name, layers: efficiency.read_config(str(models / "small"), layers),
    }
    said = run("tpu_efficiency.py", **constants)
    assert re.search(r"\| tpu:v5e:1x1 \| decode \| 8 \| \d+ \| \d+ \| [\d.]+ \|\n", said), said


@pytest.mark.slow
def test_kernels_of_attention_are_compared_alone_and_in_graphs(run, models):
    kernels = script("scripts/attention_kernels.py")
    constants = {
        "TARGETS": ("tpu:v5e:2x2",),
        "PROMPTS": (512, 1024),
        "CHUNKS": (512,),
        "CHUNK_LAYERS": 1,
        "CHUNK_SPAN": 2048,
        "G": 1,
        "EMBED": 256,
        "MLP": 512,
        "VOCAB": 1024,
        "LAYERS": 1,
        "read_config": lambda name, layers: kernels.read_config(str(models / "small"), layers),
    }
    said = run("attention_kernels.py", **constants)
    assert re.search(r"\| tpu:v5e:2x2 \| 1024 \|( [\d.]+ \|){4}\n", said), said
    assert re.search(r"\| tpu:v5e:2x2 \| 1024 \| 512 \|( [\d.]+ \|){4}\n", said), said
    for row in ("tpu:v6e:2x4 | flash", "prefill of 512 | splash"):
        assert f"\n| {row} | " in said


def test_long_contexts_have_bytes_collectives_and_seconds(run, tmp_path):
    output = tmp_path / "long.json"
    long = script("scripts/long_context.py")
    config = DecoderConfig.alike(
        vocab_size=1024,
        embed=512,
        mlp=1024,
        num_query_heads=4,
        num_kv_heads=4,
        head_dim=128,
        windows=(None,) * 2,
        max_position=4096,
    )
    tables = (
        read_layout_table("ring-tensor@sequence=2,tensor=2"),
        long.WEIGHTS_OVER_BOTH | {"mesh": {"sequence": 2, "tensor": 2}},
    )
    sizes = {"target": TARGET, "config": config, "rows": 4, "length": 2048}
    cases = [
        replace(case, layout=Layout.from_table(table), **sizes)
        for case, table in zip(long.CASES, tables, strict=True)
    ]
    run("long_context.py", "--output", output, CASES=cases)
    prefill, decode = json.loads(output.read_text())["cases"]
    assert any(found["axes"] == "sequence" for found in prefill["collectives"])
    assert decode["bytes_per_device"]["keys and values"] == 4 * 2048 * 2 * 2 * 512 * 2 // 4
