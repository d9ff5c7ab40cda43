"""Plans for a kind of devices run where these devices are; CPUs stand in for GPUs here."""

import json
from types import SimpleNamespace

import jax
import pytest
from command import completion, read_rows, write_lines

from noria.compile import device_kinds, targets
from noria.compile.target_names import UnknownTarget
from noria.runtime.commands import compile_command
from noria.runtime.pods.peers import ALONE

TARGET = "gpu:h200:2"


@pytest.fixture(scope="module")
def source(noria, tmp_path_factory):
    rows = [completion(f"row-{i}", list(range(3, 9 + i)), max_tokens=4) for i in range(3)]
    return write_lines(tmp_path_factory.mktemp("kinds") / "in.jsonl", rows)


@pytest.fixture(scope="module")
def plan(noria, source):
    path = source.with_name("plan.toml")
    options = ("--model", noria.model, "--workload", source, "-o", path, "--quiet")
    numbers = ("--dtype", "float32", "--layout", "data-parallel@data=2")
    noria.run_here("plan", *options, *numbers, "--target", TARGET)
    return path


@pytest.fixture
def h200s(monkeypatch):
    """Let this machine have two H200s."""
    devices = jax.devices("cpu")[:2]
    monkeypatch.setattr(jax, "local_devices", lambda backend: devices)
    monkeypatch.setitem(device_kinds._KINDS_BY_NAME, devices[0].device_kind, "h200")
    monkeypatch.setattr(compile_command, "default_target", lambda: "gpu")


def batch(noria, source, plan, output, *options):
    arguments = ("-i", source, "-o", output, "--model", noria.model, "--plan", plan)
    noria.run_here("batch", *arguments, "--set", "attention.prefill=xla", *options)
    return [row["response"]["status_code"] for row in read_rows(output)]


@pytest.mark.parametrize("options", [(), ("--target", "gpu:2")], ids=["plan", "number"])
def test_a_plan_runs_on_the_devices_that_it_was_made_for(
    noria, source, plan, h200s, options, tmp_path
):
    assert batch(noria, source, plan, tmp_path / "out.jsonl", *options) == [200] * 3


def test_a_bundle_of_the_kind_starts_without_compiling(
    noria, source, plan, h200s, tmp_path, capsys
):
    folder = tmp_path / "bundle"
    options = ("--set", "attention.prefill=xla")
    noria.run_here("compile", "--model", noria.model, "--plan", plan, "-o", folder, *options)
    assert json.loads((folder / "bundle.json").read_text())["executable"]
    assert batch(noria, source, folder, tmp_path / "out.jsonl") == [200] * 3
    assert "executables taken" in capsys.readouterr().err


def test_on_other_devices_a_plan_names_both_kinds(noria, source, plan, h200s, monkeypatch):
    monkeypatch.setitem(device_kinds._KINDS_BY_NAME, jax.devices("cpu")[0].device_kind, "h100")
    arguments = ("-i", source, "-o", source.with_name("no.jsonl"), "--model", noria.model)
    said = noria.refuse("batch", *arguments, "--plan", plan)
    assert f"the devices of {TARGET}, got 2 x cpu (h100)" in said
    assert "--target gpu:2" in said


def test_graphs_compile_for_absent_devices_where_others_are(h200s, monkeypatch):
    monkeypatch.setattr(targets, "find_target", lambda name: f"absent {name}")
    assert compile_command._target(TARGET, ALONE).is_present
    assert compile_command._target("gpu:h100:2", ALONE) == "absent gpu:h100:2"
    assert compile_command._target("tpu:v5e:2x4", ALONE) == "absent tpu:v5e:2x4"


def test_each_process_of_a_pod_compiles_for_its_own_devices(h200s, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "devices", jax.local_devices)
    pod = SimpleNamespace(size=2)
    assert compile_command._target(TARGET, pod).is_present
    with pytest.raises(UnknownTarget, match=r"the devices of gpu:h100:2, got .* \(h200\)"):
        compile_command._target("gpu:h100:2", pod)
