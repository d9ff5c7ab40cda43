"""`noria layouts` on a small model and simulated devices: the file, the table, the picture."""

import json
from dataclasses import replace

import numpy as np
import pytest
from model_on_disk import write_model

from noria.compile import layout_measure
from noria.compile.attention_kernels import AUTO_ATTENTION
from noria.compile.build import plan_graphs
from noria.compile.targets import find_target
from noria.runtime import session
from noria.runtime.checkpoint import open_model
from noria.runtime.cli import main
from noria.runtime.errors import OutOfMemory
from noria.runtime.files.layout_files import read_layout_table
from noria.runtime.layouts import verification
from noria.runtime.layouts.verification import NUM_PROMPTS, NotFinite, Verification
from noria.sharding.layout import Layout
from noria.sharding.projection import Projection

SHAPES = ["--slots", "8", "--length", "48", "--prompt", "16", "--prompts", "4"]
OPTIONS = ["--target", "cpu:4", *SHAPES, "--quiet"]
LEGAL = ("data-parallel", "data-tensor", "weight-gathered", "ring")
KEYS = {
    "name",
    "mesh",
    "legal",
    "findings",
    "bytes_per_device",
    "collectives",
    "flops",
    "compile_seconds",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A folder with a model, for the files that the command writes."""
    folder = tmp_path_factory.mktemp("layouts")
    write_model(folder / "model")
    return folder


@pytest.fixture(scope="module")
def results(report):
    layouts = " ".join([*LEGAL, "weight-stationary-1d@tensor=4"])
    arguments = ["--model", str(report / "model"), "-o", str(report), "--layouts", layouts]
    assert main(["layouts", *arguments, *OPTIONS, "--verify"]) == 1
    content = json.loads((report / "layouts.json").read_text())
    return {result["name"]: result for result in content}


@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_layout_has_every_fact(results, name):
    result = results[name]
    assert result["legal"] and result["findings"] == []
    assert result.keys() >= KEYS
    assert result["bytes_per_device"].keys() == {"params", "cache", "temp"}
    assert all(value > 0 for value in result["bytes_per_device"].values())
    assert result["flops"] > 0
    assert result["attention"]["prefill"].startswith("xla (numba: ")
    assert {entry["phase"] for entry in result["collectives"]} <= {"prefill", "decode"}


def test_the_mesh_of_a_named_layout_is_fitted_to_the_target(results):
    assert results["data-parallel"]["mesh"] == {"data": 4}
    assert results["data-tensor"]["mesh"] == {"data": 2, "tensor": 2}


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("name", LEGAL)
def test_a_legal_layout_says_what_its_programs_move_and_need(results, name, phase):
    found = results[name]["programs"][phase]
    assert found["bytes_moved"] > found["bytes_needed"] > 0
    assert found["bytes_needed"] == sum(found["needed"].values())
    assert any(one["line"].startswith("modelzoo/") for one in found["moved"])
    assert found["cycles"] is None


@pytest.mark.parametrize("name", LEGAL)
def test_verified_logits_are_those_of_one_device(results, name):
    assert 0 <= results[name]["max_abs_diff"] < 1e-4
    assert results[name]["agreement"] == "equal" and results[name]["weights"] == "checkpoint"


def test_weights_split_over_two_axes_take_less_than_over_one(results):
    params = {name: results[name]["bytes_per_device"]["params"] for name in LEGAL}
    assert params["weight-gathered"] < params["data-tensor"] < params["data-parallel"]


def test_collectives_of_a_layer_agree_with_the_formula(results):
    """XLA for CPU keeps the all-reduce; it sums the layer's rows in float32."""
    (found,) = (
        entry
        for entry in results["data-tensor"]["collectives"]
        if entry["phase"] == "prefill" and entry["kind"] == "all-reduce"
    )
    assert found["axis"] == "tensor"
    assert found["per_layer"] == 2
    assert found["bytes_per_layer"] == found["formula_bytes_per_layer"]


def in_layers(result):
    return {
        (c["phase"], c["kind"], c["axis"]): (c["per_layer"], c["bytes_per_layer"])
        for c in result["collectives"]
        if c["per_layer"]
    }


def test_scanned_layers_are_counted_by_their_turns(report, results, capsys):
    """A loop's body is in the program once: its figures are multiplied by the trip count."""
    folder = report / "scanned"
    arguments = ["--model", str(report / "model"), "-o", str(folder), "--layouts", "data-tensor"]
    assert main(["layouts", *arguments, *OPTIONS, "--scan-layers", "--verify"]) == 0
    (scanned,) = json.loads((folder / "layouts.json").read_text())
    assert scanned["max_abs_diff"] < 1e-4
    assert scanned["flops_from"] == "shapes"
    assert "GFLOP are computed from shapes" in capsys.readouterr().out

    assert in_layers(scanned) == in_layers(results["data-tensor"])


def test_caches_in_pages_are_measured_and_verified(report, results):
    """One layout splits rows, and the other one the entries of each page."""
    folder = report / "pages"
    arguments = ["--model", str(report / "model"), "-o", str(folder), "--page", "8"]
    arguments += ["--layouts", "data-parallel ring", *OPTIONS, "--verify"]
    assert main(["layouts", *arguments]) == 0
    for result in json.loads((folder / "layouts.json").read_text()):
        assert 0 < result["max_abs_diff"] < 1e-4
        # a row fills pages of 64 entries less
        whole = results[result["name"]]["bytes_per_device"]
        assert 0 < result["bytes_per_device"]["cache"] <= whole["cache"]


def test_a_program_that_xla_cannot_write_sends_what_the_rules_say(
    report, results, monkeypatch, capsys
):
    compile_with_text = layout_measure.compile_with_text

    def unwritten_graph(graph):
        executable, _, seconds = compile_with_text(graph)
        return executable, None, seconds

    monkeypatch.setattr(layout_measure, "compile_with_text", unwritten_graph)
    folder = report / "unwritten"
    arguments = ["--model", str(report / "model"), "-o", str(folder), "--layouts", "data-tensor"]
    assert main(["layouts", *arguments, *OPTIONS]) == 0
    (unwritten,) = json.loads((folder / "layouts.json").read_text())
    assert unwritten["collectives_from"] == "shapes"
    assert unwritten["programs"] == {}
    assert "writes no program as text" in capsys.readouterr().out
    assert in_layers(unwritten) == in_layers(results["data-tensor"])


def test_an_illegal_layout_says_why_and_has_no_figures(results):
    result = results["weight-stationary-1d"]
    assert not result["legal"]
    assert any("2 heads do not divide over 4 devices" in text for text in result["findings"])
    assert result["collectives"] == []


def test_a_picture_is_drawn(report, results):
    assert (report / "layouts.png").read_bytes().startswith(b"\x89PNG")


def test_a_layout_that_does_not_compile_is_reported_beside_the_others(report, capsys, monkeypatch):
    """If a device lacks memory, the compiler raises; the comparison reports it and continues."""

    def run_out(graph):
        raise RuntimeError(f"RESOURCE_EXHAUSTED: 17 GB of 16 GB\nin {graph.key}")

    monkeypatch.setattr(layout_measure, "compile_with_text", run_out)
    folder = report / "full"
    arguments = ["--model", str(report / "model"), "-o", str(folder), "--layouts", "data-tensor"]
    assert main(["layouts", *arguments, *OPTIONS]) == 1
    (result,) = json.loads((folder / "layouts.json").read_text())
    (finding,) = result["findings"]
    assert result["legal"]
    assert "prefill 16x4 does not compile for cpu:4: RESOURCE_EXHAUSTED: 17 GB of 16 GB" in finding
    printed = capsys.readouterr().out
    assert finding in printed and printed.count("does not compile") == 2
    assert (folder / "layouts.png").exists()


def test_a_logit_that_is_not_a_number_is_no_agreement(report, monkeypatch):
    def logits(self, layout):
        logits_BV = np.full((NUM_PROMPTS, 3), 1.0 if layout is None else np.nan)
        yield np.zeros(NUM_PROMPTS, np.int32), logits_BV

    monkeypatch.setattr(Verification, "_logits", logits)
    layout = Layout.from_table(read_layout_table("data-tensor@data=2,tensor=2"))
    with open_model(str(report / "model")) as files:
        compared = Verification(files, find_target("cpu:4"), "float32")
        compared.read_reference()
        with pytest.raises(ValueError, match=r"expected finite logits, got .* nan"):
            compared.max_abs_diff(layout)


def test_a_logit_that_is_not_a_number_leaves_the_figures_of_other_layouts(
    report, monkeypatch, capsys
):
    def difference(self, layout):
        if layout.name.startswith("data-tensor"):
            raise NotFinite("--verify data-tensor: expected finite logits")
        return 0.25

    monkeypatch.setattr(Verification, "max_abs_diff", difference)
    folder = report / "nan"
    arguments = ["--model", str(report / "model"), "-o", str(folder), *OPTIONS, "--verify"]
    assert main(["layouts", *arguments, "--layouts", "data-tensor data-parallel"]) == 1
    wrong, right = json.loads((folder / "layouts.json").read_text())
    assert (wrong["verdict"], right["verdict"]) == ("not finite", "")
    assert wrong["findings"] == ["--verify data-tensor: expected finite logits"]
    assert right["max_abs_diff"] == 0.25 and right["flops"] > 0
    assert right["agreement"] == "differs" and right["tolerance"] < 0.01
    printed = capsys.readouterr().out
    assert "not finite" in printed and "2.5e-01, differs" in printed


def verify(report, name, *options):
    """Compare layouts; return the exit code and the results by name."""
    folder = report / name
    arguments = ["--model", str(report / "model"), "-o", str(folder), *OPTIONS, "--verify"]
    code = main(["layouts", *arguments, *options])
    if not (folder / "layouts.json").exists():
        return code, {}
    results = json.loads((folder / "layouts.json").read_text())
    return code, {result["name"]: result for result in results}


def test_a_layout_whose_partial_sums_are_not_summed_differs(report, monkeypatch, capsys):
    whole = Projection.reduce

    def reduce(self, out):
        return whole(replace(self, sum_over=()), out)

    monkeypatch.setattr(Projection, "reduce", reduce)
    code, results = verify(report, "unsummed", "--layouts", "data-parallel data-tensor")
    assert code == 1
    assert results["data-parallel"]["agreement"] == "equal"
    assert results["data-tensor"]["agreement"] == "differs"
    assert results["data-tensor"]["max_abs_diff"] > 0.1
    assert ", equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "dtype"), [((), "float32"), (("--dtype", "bfloat16"), "bfloat16")], ids=str
)
def test_layouts_are_compared_in_float32_unless_a_dtype_is_named(
    report, monkeypatch, options, dtype
):
    found = []
    monkeypatch.setattr(session, "resolve_dtype", lambda *_: "bfloat16")
    monkeypatch.setattr(Verification, "read_reference", lambda self: found.append(self.dtype))
    monkeypatch.setattr(Verification, "tolerance", 1e-3)
    monkeypatch.setattr(Verification, "max_abs_diff", lambda self, layout: 1e-4)
    code, results = verify(report, f"dtype-{dtype}", "--layouts", "data-parallel", *options)
    assert code == 0 and results["data-parallel"]["agreement"] == "equal"
    assert found == [dtype]


def test_a_model_that_cannot_be_read_is_refused_before_anything_is_compiled(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(layout_measure, "compile_with_text", pytest.fail)
    write_model(tmp_path / "model")
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": 99_999}))
    assert verify(tmp_path, "bad", "--layouts", "data-parallel") == (3, {})
    assert "99999" in capsys.readouterr().err


def test_figures_are_written_if_a_later_comparison_fails(report, monkeypatch):
    def fail(self, layout):
        if layout.name == "ring":
            raise OutOfMemory("no room for a layout")
        return 0.0

    monkeypatch.setattr(Verification, "max_abs_diff", fail)
    code, results = verify(report, "later", "--layouts", "data-parallel ring")
    assert code == OutOfMemory.exit_code
    assert results["data-parallel"]["agreement"] == "equal"
    assert "agreement" not in results["ring"] and results["ring"]["flops"] > 0


def test_figures_are_written_if_a_later_layout_fails(report, monkeypatch):
    measure = layout_measure.measure

    def fail(measured, layout, *rest, **options):
        if layout.name == "ring":
            raise OutOfMemory("no room for a graph")
        return measure(measured, layout, *rest, **options)

    monkeypatch.setattr(layout_measure, "measure", fail)
    folder = report / "stopped"
    arguments = ["--model", str(report / "model"), "-o", str(folder), *OPTIONS]
    code = main(["layouts", *arguments, "--layouts", "data-parallel ring"])
    assert code == OutOfMemory.exit_code
    (result,) = json.loads((folder / "layouts.json").read_text())
    assert result["name"] == "data-parallel" and result["flops"] > 0
    assert (folder / "layouts.png").exists()


def test_the_kernel_that_is_asked_for_is_the_one_that_is_verified(report, monkeypatch):
    asked = []

    def planned(*arguments, attention=AUTO_ATTENTION):
        asked.append((attention.prefill, arguments[1].prefill[0].length))
        return plan_graphs(*arguments, attention=attention)

    monkeypatch.setattr(verification, "plan_graphs", planned)
    arguments = ["--model", str(report / "model"), "-o", str(report / "named")]
    arguments += ["--layouts", "data-parallel", *OPTIONS, "--verify"]
    arguments += ["--attention", "xla", "--length", "64", "--prompt", "48"]
    assert main(["layouts", *arguments]) == 0
    assert asked == [("auto", 32), ("xla", 48)]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--slots", "0", "--slots: expected at least 1, got 0."),
        ("--prompts", "-1", "--prompts: expected at least 1, got -1."),
        (
            "--prompt",
            "49",
            "--prompt: expected at most 48 tokens, the --length of the cache, got 49",
        ),
    ],
)
def test_shapes_that_cannot_be_are_refused_by_option(report, capsys, option, value, message):
    arguments = ["--model", str(report / "model"), "-o", str(report)]
    assert main(["layouts", *arguments, *OPTIONS, option, value]) == 2
    assert message in capsys.readouterr().err


def test_an_unknown_layout_is_refused_with_the_names_that_are_known(report, capsys):
    arguments = ["--model", str(report / "model"), "-o", str(report), "--layouts", "tensor-4d"]
    assert main(["layouts", *arguments, *OPTIONS]) == 2
    assert "expected a .toml file or one of data-parallel" in capsys.readouterr().err


def test_layouts_are_ranked_by_the_seconds_of_their_plans_for_a_workload(report, capsys):
    table = report / "rows.csv"
    table.write_text("prompt_tokens,output_tokens,rows\n20,5,30\n9,3,20\n")
    names = "data-parallel@data=4 data-tensor@data=2,tensor=2"
    arguments = ["--model", str(report / "model"), "-o", str(report / "ranked"), "--layouts", names]
    assert main(["layouts", *arguments, *OPTIONS, "--layers", "1", "--workload", str(table)]) == 0
    results = json.loads((report / "ranked" / "layouts.json").read_text())
    predicted = [result["predicted"] for result in results]
    assert [one["name"] for one in predicted] == ["data-parallel", "data-tensor"]
    first, second = sorted(predicted, key=lambda one: one["rank"])
    assert 0 < first["seconds"] <= second["seconds"]
    said = capsys.readouterr().out
    assert f"why        {first['name']}" in said
    assert all(f"{one['seconds']:.1f}" in said for one in predicted)
