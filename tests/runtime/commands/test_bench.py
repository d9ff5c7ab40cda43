"""`noria bench`: every case on the grid of its shape, consistent figures, and refusals."""

import argparse
import io
import json
from functools import partial
from types import SimpleNamespace

import jax
import pytest
from model_on_disk import write_model
from tiny import CONFIG, random_parameters

from noria.compile.abstract_model import AbstractModel
from noria.runtime import cli, session
from noria.runtime.checkpoint import save_orbax
from noria.runtime.commands import bench_command as bench
from noria.runtime.files.hardware_files import known_hardware
from noria.runtime.planning import calibration
from noria.runtime.planning.calibration import Trial


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "tiny\x1b[2J"
    save_orbax(path, random_parameters(AbstractModel(CONFIG)), family="llama", config=CONFIG)
    return path


@pytest.fixture(scope="module")
def report(model_directory, tmp_path_factory):
    """The JSON report of four cases, and the printed output."""
    path = tmp_path_factory.mktemp("report") / "bench.json"
    arguments = f"--pp 16,24 --tg 5 --batch 1,3 --repeats 2 --json {path}"
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr("sys.stdout", printed)
        assert cli.main(["bench", "--model", str(model_directory), *arguments.split()]) == 0
    return json.loads(path.read_text()), printed.getvalue()


def test_every_combination_is_a_row_of_the_table(report):
    _, printed = report
    rows = [line.strip("| ").split(" | ") for line in printed.splitlines() if line[:1] == "|"]
    assert rows[0] == [*bench.COLUMNS, "waste"]
    sizes = [[int(cell) for cell in row[:4]] for row in rows[2:]]
    assert sizes == [[16, 5, 1, 21], [16, 5, 3, 63], [24, 5, 1, 29], [24, 5, 3, 87]]


def test_the_name_of_a_model_is_shown_and_not_sent_to_the_terminal(report):
    assert report[1].startswith(r"tiny\x1b[2J, float32")


def test_no_case_compiles_while_it_is_measured(report):
    measured, _ = report
    assert [case["compiles_during_run"] for case in measured["cases"]] == [0] * 4


def test_the_report_says_what_it_was_measured_on(report):
    machine = report[0]["machine"]
    assert machine["processor"] and machine["devices"] and machine["versions"]["jax"]
    assert "run" not in report[0]["settings"]


def test_times_of_the_phases_are_inside_the_wall_time(report):
    measured, _ = report
    for case in measured["cases"]:
        assert len(case["timings"]) == 2
        for timing in case["timings"]:
            phases = timing["prefill_seconds"] + timing["decode_seconds"]
            assert 0 < phases <= timing["wall_seconds"]


def test_prompts_of_a_case_are_those_of_earlier_records():
    assert bench.random_prompts(bench.Case(4, 1, 2), 100) == [[85, 63, 51, 26], [30, 4, 7, 1]]


def test_padding_is_of_one_run_and_of_the_grid_of_the_case(report):
    measured, _ = report
    for case in measured["cases"]:
        sizes, padding = case["case"], case["padding"]
        tokens = (sizes["prompt_length"] + sizes["output_length"]) * sizes["rows"]
        assert padding["real_tokens"] == tokens
        (length, batch) = case["grid"]["prefill"][0]
        calls = -(-sizes["rows"] // batch)
        padded = calls * batch * length - sizes["rows"] * sizes["prompt_length"]
        assert padding["prefill_padding_tokens"] == padded
        assert case["waste"] == pytest.approx(1 - tokens / padding["computed_tokens"])


def test_a_case_that_is_too_long_is_refused_before_anything_is_built(model_directory, capsys):
    code = cli.main(["bench", "--model", str(model_directory), "--pp", "8,120", "--tg", "16"])
    assert code == 2
    captured = capsys.readouterr()
    assert "expected at most 128 tokens per row" in captured.err
    assert "PP 120, TG 16, B 1" in captured.err
    assert captured.out == ""


def test_a_layout_is_measured_as_one_device_is(model_directory, tmp_path):
    path = tmp_path / "bench.json"
    sizes = ["--pp", "16", "--tg", "4", "--batch", "3", "--repeats", "1", "--json", str(path)]
    layout = ["--target", "cpu:4", "--layout", "data-tensor@data=2,tensor=2"]
    assert cli.main(["bench", "--model", str(model_directory), *sizes, *layout]) == 0
    (case,) = json.loads(path.read_text())["cases"]
    assert case["grid"]["decode_slots"] == 4  # three rows, in slots that two replicas divide
    assert case["compiles_during_run"] == 0


def test_a_model_with_experts_says_what_was_dropped(tmp_path):
    model = tmp_path / "sparse"
    write_model(model, tokenizer=False, num_experts=4)
    path = tmp_path / "bench.json"
    sizes = ["--pp", "16", "--tg", "4", "--batch", "9", "--repeats", "1", "--json", str(path)]
    keys = ["decode.dispatch=capacity", "decode.capacity_factor=0.5", "overflow=drop"]
    options = [word for key in keys for word in ("--set", f"experts.{key}")]
    assert cli.main(["bench", "--model", str(model), *sizes, *options]) == 0
    (case,) = json.loads(path.read_text())["cases"]
    phases = [case["experts"][phase] for phase in ("prefill", "decode")]
    assert phases[0]["dropped"] == 0 < phases[1]["dropped"]


def test_the_model_has_the_numbers_of_the_plan(tmp_path, monkeypatch):
    model, loaded, load = tmp_path / "model", [], session.load_model
    write_model(model, tokenizer=False)
    monkeypatch.setattr(
        session, "load_model", lambda *x, **k: loaded.append(load(*x, **k)) or loaded[0]
    )
    keys = ["numbers.weights=int8", "numbers.cache=int8", "numbers.dtype=bfloat16"]
    keys.append("model.scan_layers=true")
    options = [word for key in keys for word in ("--set", key)]
    sizes = ["--pp", "16", "--tg", "4", "--batch", "2", "--repeats", "1", "--dtype", "float32"]
    assert cli.main(["bench", "--model", str(model), *sizes, *options]) == 0
    (of_bench,) = loaded
    assert of_bench.dtype == "bfloat16"
    assert "int8" in {array.dtype.name for array in of_bench.parameters.values()}
    arrangement = of_bench.definition.arrangement
    assert arrangement.scan_layers and arrangement.cache_codes == "int8"


@pytest.mark.parametrize("value", ["", "0", "8,", "eight"])
def test_sizes_that_are_no_positive_integers_are_refused(value, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "--model", "smollm2", f"--pp={value}"])
    assert stopped.value.code == 2
    assert f"got {value!r}" in capsys.readouterr().err


def test_a_case_that_the_device_refuses_is_named(model_directory, monkeypatch, capsys):
    def refuse(*_):
        raise RuntimeError("RESOURCE_EXHAUSTED")

    monkeypatch.setattr(bench, "run_case", refuse)
    arguments = ["--model", str(model_directory), "--pp", "16", "--tg", "5", "--batch", "7"]
    assert cli.main(["bench", *arguments]) == 4
    assert "PP 16, TG 5, B 7: RESOURCE_EXHAUSTED" in capsys.readouterr().err


def test_a_model_that_is_not_there_ends_with_the_code_of_models(capsys):
    assert cli.main(["bench", "--model", "no/such/model"]) == 3
    assert "no/such/model" in capsys.readouterr().err


def test_a_calibration_refuses_the_options_of_cases(capsys):
    arguments = ("--calibration", "c.json", "--pp", "64", "--set", "buckets.decode_slots=4")
    assert cli.main(["bench", "--model", "smollm2", *arguments]) == 2
    assert "expected no options of cases, got --pp, --set." in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--hardware=mine.toml", "--kind=h100", "--longest=64"])
def test_cases_refuse_the_options_of_a_calibration(option, capsys):
    assert cli.main(["bench", "--model", "smollm2", option]) == 2
    name = option.partition("=")[0]
    assert f"{name}: expected only together with --calibration FILE" in capsys.readouterr().err


@pytest.fixture
def gpu(monkeypatch):
    """Let this machine have one GPU of a name."""

    def show(name: str) -> None:
        device = SimpleNamespace(device_kind=name)
        monkeypatch.setattr(jax, "local_devices", lambda backend: [device])

    return show


def test_accelerators_of_no_kind_are_refused_before_anything_is_opened(gpu, capsys):
    gpu("NVIDIA L4")
    arguments = ("--calibration", "c.json", "--target", "gpu")
    assert cli.main(["bench", "--model", "no/such/model", *arguments]) == 2
    assert "--kind h100" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        (("--target", "gpu"), "h200"),
        (("--target", "gpu:h200:1"), "h200"),
        (("--target", "gpu", "--kind", "h100"), "h100"),
    ],
)
def test_a_calibration_is_for_the_kind_of_the_devices(gpu, options, kind):
    gpu("NVIDIA H200")
    parser = argparse.ArgumentParser()
    bench.add_options(parser)
    parsed = parser.parse_args(["--model", "m", "--calibration", "c.json", *options])
    assert bench._hardware(parsed, bench._target(parsed)) == known_hardware()[kind]


def test_a_calibration_is_not_written_over_its_tables(tmp_path, capsys):
    path = tmp_path / "mine.toml"
    path.write_text("")
    arguments = ("--calibration", str(path), "--hardware", str(path))
    assert cli.main(["bench", "--model", "no/such/model", *arguments]) == 2
    assert "is an input too" in capsys.readouterr().err


def test_a_plan_takes_a_calibration_that_was_made_with_its_own_tables(
    model_directory, tmp_path, monkeypatch, capsys
):
    trials = (Trial(4, 32), Trial(4, 32, chunk=16))
    monkeypatch.setattr(calibration, "measure", partial(calibration.measure, trials=trials))
    hardware, made = tmp_path / "mine.toml", tmp_path / "calibration.json"
    hardware.write_text(
        "[cpu]\nsource = 'measured'\nflops = { float32 = 1e11 }\nmemory_bytes = 1e10\n"
        "memory_rate = 1e10\nlink_rate = 1e10\nwraps = []\n"
    )
    tables = ["--hardware", str(hardware), "--calibration", str(made)]
    model = ["--model", str(model_directory)]
    assert cli.main(["bench", *model, *tables, "--longest", "64"]) == 0
    assert json.loads(made.read_text())["hardware"]["source"] == "measured"

    workload = tmp_path / "rows.csv"
    workload.write_text("prompt_tokens,output_tokens\n5,3\n")
    planned = [*model, "--workload", str(workload), "-o", str(tmp_path / "plan.toml"), "--quiet"]
    assert cli.main(["plan", *planned, *tables]) == 0
    assert f"evidence   calibration {made.name}" in capsys.readouterr().out
    assert cli.main(["plan", *planned, *tables[2:]]) == 2
    assert "with the same tables (--hardware)" in capsys.readouterr().err
