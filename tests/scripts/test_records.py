"""Every script that makes a record in `benchmarks/` runs in a test; these need nothing but a CPU.

The sizes are tiny, so the figures mean nothing: the tests are of the records' forms.
"""

import ast
import json
import os
import re
import subprocess
import sys
import zipfile

import pytest
from alike import changed
from model_on_disk import write_model
from numerics_helpers import ROOT, script

from noria.modelzoo.weights.weight_formats import Quantisation, WeightFormat
from noria.runtime.checkpoint import open_model

MADE_BY = re.compile(r"scripts/([a-z_]+\.py)")
RECORD = re.compile(r"(?:--output|>|\.py) \\?\n? *benchmarks/")
"""A command in a script's docstring that writes into the folder of records."""


def test_every_script_that_makes_a_record_is_run_by_a_test():
    pages = (path.read_text("utf-8") for path in (ROOT / "benchmarks").glob("*.md"))
    named = {name for page in pages for name in MADE_BY.findall(page)}
    scripts = {path.name: path.read_text("utf-8") for path in (ROOT / "scripts").glob("*.py")}
    docstrings = {name: ast.get_docstring(ast.parse(text)) or "" for name, text in scripts.items()}
    makers = {name for name in scripts if name in named or RECORD.search(docstrings[name])}
    assert {"make_workloads.py", "bench_peers.py"} < makers
    constants = {
        node.value
        for path in (ROOT / "tests" / "scripts").glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Constant)
    }
    # a test that runs a script names it without its folder
    assert makers - constants == set(), "run these with tiny sizes in tests/scripts"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_model(folder)
    return folder


def test_planned_grids_are_beside_those_picked_by_hand(run, tmp_path):
    workload, output = tmp_path / "some.csv", tmp_path / "planner"
    rows = (f"{20 + 7 * i},{4 + i}" for i in range(24))
    workload.write_text("\n".join(["prompt_tokens,output_tokens", *rows]) + "\n")
    planner = script("scripts/bench_planner.py")
    small = changed(planner.LLAMA_1B, windows=(None,) * 2)
    arguments = (workload, "--output", output, "--tries", 2)
    constants = {"TARGETS": {"cpu": "float32"}, "LLAMA_1B": small, "MOST_PADDING": 2.0}
    run("bench_planner.py", *arguments, **constants)
    (found,) = json.loads(output.with_suffix(".json").read_text())["workloads"]
    assert found["rows"] == 24 and found["prompt_tokens"] == sum(20 + 7 * i for i in range(24))
    page = output.with_suffix(".md").read_text()
    assert page.count("\n| some | ") == len(found["by_hand"]) + 1


def test_workloads_are_of_distributions_and_of_functions(run, tmp_path, monkeypatch):
    library, output = tmp_path / "library", tmp_path / "workloads"
    library.mkdir()
    output.mkdir()
    (library / "some.py").write_text("def f():\n    return 1\n\n\ndef g(x):\n    return x + x\n")
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(library)})
    run("make_workloads.py", output, ROWS=5)
    sizes = {path.stem: path.read_text().count("\n") for path in output.glob("*.csv")}
    assert sizes.pop("functions") == 1 + 2
    assert len(sizes) == 7 and set(sizes.values()) == {1 + 5}


def test_errors_of_gptq_are_by_layer_and_number_of_tokens(run, model, tmp_path, monkeypatch):
    rows, output = tmp_path / "rows.jsonl", tmp_path / "tokens.md"
    rows.write_text("".join(f'{{"prompt": {[3 + i, 7, 9, 11 + i]}}}\n' for i in range(8)))
    constants = {
        "ROWS": rows,
        "LAYERS": (0, 1),
        "NUM_TOKENS": (4, 12),
        "QUANTISATION": Quantisation(WeightFormat("int4", 16), (-2,)),
        "open_model": lambda name: open_model(str(model)),
    }
    run("calibration_tokens.py", "--output", output, **constants)
    page = output.read_text()
    for row in ("| 0, mlp.gate_up | 32 |", "| 1, mlp.down | 48 |"):
        assert re.search(re.escape(row) + r" \**[\d.]+\** \| \**[\d.]+\** \|\n", page), page


def test_temporary_memory_is_by_length_and_blocks(run):
    said = run("attention_memory.py", LENGTHS=(64, 128), BLOCKS=((16, 16),))
    assert re.search(r"\n\| 64 \| \d+ \| [\d.]+ \(\d+\) \|\n\| 128 \|", said), said


def test_capacities_have_a_row_for_each_size_and_skew(run):
    sizes = {"EXPERTS": ((4, 2),), "TOKENS": (8,), "SKEWS": (0.0, 1.0), "NUM_DRAWS": 1}
    said = run("expert_capacity.py", **sizes)
    assert "| 4, 2 chosen | 8 | 0 |" in said and "| 4, 2 chosen | 8 | 1 |" in said


def test_forced_tokens_are_counted_in_the_answers_of_a_job(run, model, tmp_path):
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    form = {"body": {"structured_outputs": {"choice": ["the water", "no"]}}}
    answer = {"response": {"body": {"choices": [{"message": {"content": "the water"}}]}}}
    free = {"body": {}}, {"response": None}
    asked.write_text(f"{json.dumps(form)}\n{json.dumps(free[0])}\n")
    answered.write_text(f"{json.dumps(answer)}\n{json.dumps(free[1])}\n")
    said = run("forced_text.py", "-i", asked, "-o", answered, "--model", model)
    assert "from 1 answers with" in said and "\n| 2 tokens | 1 | " in said, said


def test_waits_of_a_simulated_device_are_by_kinds_of_calls(run, tmp_path):
    output = tmp_path / "host.json"
    sizes = ("--slots", 4, "--rows", 6, "--call-ms", 0.1, "--steps", 2)
    run("bench_host.py", *sizes, "--output", output, LONGEST_WAIT_MS=float("inf"))
    jobs = json.loads(output.read_text())["jobs"]
    assert list(jobs) == ["plain rows", "rows with stop strings"]
    assert all("decode, decode" in job["waits_ms"] for job in jobs.values())
    assert output.with_suffix(".md").read_text().count("| decode, decode |") == 2


def test_schemas_of_packages_are_served_or_refused_with_a_reason(run, tmp_path):
    schemas = {
        "served.json": {"properties": {"a": {"type": "boolean"}}, "required": ["a"]},
        "refused.json": {"properties": {"a": {"uniqueItems": True}}},
        "other.json": [],
    }
    with zipfile.ZipFile(tmp_path / "some-1.0-py3-none-any.whl", "w") as wheel:
        for name, schema in schemas.items():
            wheel.writestr(name, json.dumps(schema))
    output = tmp_path / "corpus"
    trie = script("scripts/structured_walks.py").trie
    arguments = (tmp_path, "--output", output, "--answers", 5)
    said = run("structured_corpus.py", *arguments, VOCABULARIES={"smollm2": trie})
    assert "| some-1.0 | 2 | 1 | 1 |" in said and "Of 5 random answers" in said
    assert said.endswith(output.with_suffix(".md").read_text() + "\n")
    assert len(json.loads(output.with_suffix(".json").read_text())["some-1.0"]) == 2


def test_forms_have_a_row_of_their_tables_and_walks_find_the_same_masks(run, model):
    forms = {"choice": {"choice": ["yes", "no"]}}
    said = run("structured_rows.py", "--tables", "--model", model, FORMS=forms)
    assert re.search(r"\n\| choice \| \d+ \|( [\d.]+ \|){4}\n", said), said
    # which imports the forms of the script above
    assert "3 walks, " in run("structured_walks.py", "--walks", 3)


@pytest.mark.reference
def test_layers_of_experts_are_beside_those_of_others(run, tmp_path):
    output = tmp_path / "experts.json"
    sizes = {"EMBED": 16, "HIDDEN": 24, "PLACED_EMBED": 8, "TOKENS": (8,)}
    placed = {"PLACED": ((6, 2),), "PLACED_TOKENS": (20,)}
    run("bench_experts.py", "--repeats", 1, "--output", output, **sizes, **placed)
    (layer,) = json.loads(output.read_text())["layer"]
    assert set(layer["milliseconds"]) >= {"noria, lossless", "transformers, eager"}
    assert layer["rows_over_choices"] >= 1
    assert "| 6 / 2 | 20 | one-hot products |" in output.with_suffix(".md").read_text()


@pytest.mark.reference
def test_embeddings_are_equal_to_those_of_transformers_and_other_runs_stay(run, tmp_path):
    output = tmp_path / "embeddings.json"
    lengths = [3, 9, 4, 30, 3]
    shapes = {"tiny": {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24}}
    constants = {"SHAPES": shapes, "NUM_HEADS": 2, "PARTS": 2}
    constants["mixed_lengths"] = lambda count: lengths
    arguments = ("--shapes", "tiny", "--dtypes", "float32", "--output", output)
    run("bench_embeddings.py", *arguments, **constants)
    (found,) = json.loads(output.read_text())["runs"]
    assert found["max_difference"] < 1e-5 and found["graphs"] == 1
    assert found["padding_ratio"] == pytest.approx(5 * 30 / sum(lengths))
    other = found | {"dtype": "bfloat16"}
    output.write_text(json.dumps({"runs": [other, found | {"texts": 0}]}))
    run("bench_embeddings.py", *arguments, **constants)
    runs = json.loads(output.read_text())["runs"]
    assert [run["dtype"] for run in runs] == ["bfloat16", "float32"] and runs[1]["texts"] == 5
    assert "| tiny | float32 | 5 | 49 | 1 |" in output.with_suffix(".md").read_text()


def test_a_profile_has_the_kinds_of_work_of_both_calls(model, tmp_path):
    """In a process of its own: jax's profiler crashes a process in which libtpu has compiled."""
    output = tmp_path / "profile.md"
    sizes = ("--slots", "2", "--length", "96", "--prompt", "40", "--dtypes", "float32")
    program = f"""
import importlib, sys
profile_calls = importlib.import_module(sys.argv.pop(1).removesuffix(".py"))
from noria.runtime.checkpoint import open_model
profile_calls.CALLS, profile_calls.READ_FLOATS = 1, 2**10
profile_calls.open_model = lambda name: open_model({str(model)!r})
profile_calls.measured_ceiling = lambda dtype: 100.0
profile_calls.main()
"""
    done = subprocess.run(
        [sys.executable, "-c", program, "profile_calls.py", *sizes, "--output", str(output)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "scripts")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    page = output.read_text()
    assert "decode in float32" in page and "- prefill in float32:" in page


def test_layouts_are_compared_with_published_figures(run, tmp_path):
    study = script("scripts/layout_study.py")
    few = {name: getattr(study, name).first_layers(2) for name in ("PALM", "SERIAL")}
    rows = {"prefill": [1, 64], "decode": [64]}
    run("layout_study.py", "--no-compile", "--output", tmp_path / "study", ROWS=rows, **few)
    found = json.loads((tmp_path / "study.json").read_text())
    assert [point["rows"] for point in found["sweeps"]["prefill"]["weight-gathered X"]] == [1, 64]
    assert (tmp_path / "study.png").stat().st_size > 0
    assert "2211.05102" in (tmp_path / "study.md").read_text()


def test_plans_with_pages_are_beside_recorded_ones_without(run, model, tmp_path):
    workload, output = tmp_path / "some.csv", tmp_path / "pages"
    rows = (f"{3 + i},{2 + i % 5}" for i in range(12))
    workload.write_text("\n".join(["prompt_tokens,output_tokens", *rows]) + "\n")
    constants = {"MODELS": model.parent, "PAGE": 4, "CASES": ((model.name, "cpu"), ("none", "gpu"))}
    arguments = (workload, "--output", output, "--only", "cpu", "--tries", 1)
    run("bench_pages.py", *arguments, **constants)
    record = json.loads(output.with_suffix(".json").read_text())
    (found,) = record["cases"]
    assert found["without"] == {} and found["with"]["pages"] > 0
    assert found["with"]["evidence"].endswith("reads of pages assumed")
    assert output.with_suffix(".md").read_text().count("\n| some | 12 | nan | ") == 1
    found["without"] = {**found["with"], "seconds": 1000.0, "pages": None}
    output.with_suffix(".json").write_text(json.dumps(record))
    run("bench_pages.py", *arguments, **constants)
    assert output.with_suffix(".md").read_text().count("\n| some | 12 | 1000.0 | ") == 1
