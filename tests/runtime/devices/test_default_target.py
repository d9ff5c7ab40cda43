"""The default target: the accelerator that jax would use, found without jax."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from noria.runtime import cli
from noria.runtime.devices import default_target
from noria.runtime.devices.default_target import GPU_PLUGINS, TPU_PLUGINS


@pytest.fixture
def found(tmp_path, monkeypatch):
    """Find the default target for some devices and plugins, without any choice by the user."""
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def find(*devices: str, plugins=(*TPU_PLUGINS, *GPU_PLUGINS)) -> str:
        monkeypatch.setattr(default_target, "_can_find", lambda module: module in plugins)
        for device in devices:
            (tmp_path / device).parent.mkdir(exist_ok=True)
            (tmp_path / device).touch()
        return default_target.default_target(tmp_path)

    return find


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ((), "cpu"),
        (("null", "nvme0", "nvidiactl"), "cpu"),
        (("nvidia0", "nvidiactl"), "gpu"),
        (("dxg",), "gpu"),
        (("accel0",), "tpu"),
        (("vfio/0", "nvidia0"), "tpu"),
    ],
)
def test_an_accelerator_that_is_there_is_taken(found, devices, expected):
    assert found(*devices) == expected


def test_a_device_without_its_plugin_is_not_taken(found):
    assert found("nvidia0", "accel0", plugins=()) == "cpu"
    assert found("nvidia0", "accel0", plugins=GPU_PLUGINS[1:]) == "gpu"


@pytest.mark.parametrize(
    ("chosen", "expected"), [("cpu", "cpu"), ("cuda,cpu", "gpu"), ("tpu", "tpu"), ("", "gpu")]
)
def test_the_platform_that_the_user_chose_goes_before_what_there_is(
    found, monkeypatch, chosen, expected
):
    monkeypatch.setenv("JAX_PLATFORMS", chosen)
    assert found("nvidia0") == expected


@pytest.mark.parametrize(("chosen", "expected"), [("cpu", "cpu"), ("cuda", "gpu"), (None, "gpu")])
def test_the_settings_of_jax_count_where_it_is_imported(found, monkeypatch, chosen, expected):
    """A script may have set them itself."""
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    config = SimpleNamespace(values={"jax_platforms": chosen})
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(config=config))
    assert found("nvidia0") == expected


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_gpus_that_the_user_hid_are_not_taken(found, monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert found("nvidia0") == "cpu"


def test_neither_jax_nor_a_plugin_is_imported():
    code = (
        "import sys; from noria.runtime.devices import default_target as found; "
        "found.default_target(), found._is_installed(found.TPU_PLUGINS + found.GPU_PLUGINS); "
        "sys.exit(bool({'jax', 'libtpu', 'jax_plugins.xla_cuda12'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("command", "module"), [("batch", "batch.batch_model"), ("bench", "commands.bench_command")]
)
def test_a_target_that_was_found_and_cannot_run_is_named_with_its_remedy(
    command, module, monkeypatch, tmp_path, capsys
):
    """A fallback would silently run rows on another device, and in another dtype."""
    monkeypatch.setattr(f"noria.runtime.{module}.default_target", lambda: "gpu")
    rows = tmp_path / "in.jsonl"
    rows.write_text('{"prompt": "a"}\n')
    files = ("-i", str(rows), "-o", str(tmp_path / "out.jsonl")) if command != "bench" else ()
    assert cli.main([command, "--model", "smollm2", *files]) == 2
    assert "use --target cpu" in capsys.readouterr().err
