"""Targets: names, what they lead to, and what is said of those that lead nowhere."""

from importlib.util import find_spec

import jax
import pytest

from noria.compile.planning.hardware import num_devices
from noria.compile.targets import UnknownTarget, find_target


def test_cpu_is_the_first_device_of_this_machine():
    target = find_target("cpu")
    assert target.is_present
    assert target.platform == "cpu"
    assert target.devices == (jax.devices("cpu")[0],)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "CPU",
        "cuda",
        "v5e:2x4",
        "gpu0",
        "cpu:",
        "tpu:",
        "cpu:0",
        "cpu:x",
        "cpu:a:8",
        "cpu:2x4",
        "gpu:h100",
        "gpu:h100:",
        "gpu:h100:x",
        "gpu:h100:-1",
        "tpu:v5e",
        "tpu:v5e:2x",
        "tpu:v5e:2x0",
        "tpu:v5e:2y4",
        3,
    ],
)
def test_a_name_of_no_known_platform_is_refused_with_the_names_that_are(name):
    message = f"expected cpu, gpu, tpu, a number of them .*, got {name!r}"
    with pytest.raises(UnknownTarget, match=message):
        find_target(name)
    with pytest.raises(UnknownTarget, match=message):
        num_devices(name)


def test_a_number_of_devices_is_the_first_ones_of_that_kind():
    assert find_target("cpu:6").devices == tuple(jax.devices("cpu")[:6])


def test_more_devices_than_there_are_is_refused_with_the_remedy():
    message = "cpu:9 needs 9 devices, got 8 of kind cpu.*device_count=9"
    with pytest.raises(UnknownTarget, match=message):
        find_target("cpu:9")


def test_more_devices_of_another_platform_than_there_are_says_to_ask_for_fewer(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda backend: ["one", "two"])
    message = r"gpu:3 needs 3 devices, got 2 of kind gpu\. Ask for as many as there are\.$"
    with pytest.raises(UnknownTarget, match=message):
        find_target("gpu:3")


@pytest.mark.parametrize("name", ["gpu", "tpu"])
def test_a_platform_that_is_not_here_names_the_remedy(name):
    if any(device.platform == name for device in jax.devices()):
        pytest.skip(f"this machine has a {name}")
    with pytest.raises(UnknownTarget, match=f"'{name}' is not on this machine.*--target cpu"):
        find_target(name)


@pytest.mark.tpu_compile
def test_a_tpu_topology_need_not_be_present():
    target = find_target("tpu:v5e:2x4")
    assert not target.is_present
    assert target.platform == "tpu"
    assert len(target.devices) == 8
    assert target.placement().replicated.is_fully_replicated


@pytest.mark.tpu_compile
@pytest.mark.parametrize("name", ["tpu:v4:2x2x4", "tpu:v5e:4x4", "tpu:v5p:2x2x4", "tpu:v6e:4x4"])
def test_a_topology_has_as_many_devices_as_its_name_says(name):
    assert len(find_target(name).devices) == num_devices(name) == 16


@pytest.mark.tpu_compile
def test_an_unknown_topology_is_refused_with_one_that_exists():
    message = "no topology 'v5e:3x5'.*Expected for example tpu:v5e:2x4"
    with pytest.raises(UnknownTarget, match=f"(?s){message}"):
        find_target("tpu:v5e:3x5")


@pytest.mark.parametrize("name", ["gpu:b1:8", "gpu:h100:12"])
def test_gpus_that_no_host_has_are_refused_with_those_that_are_known(name):
    message = f"no GPUs {name!r}.*gpu:h100:8: a kind of a100, h100, h200, up to 8"
    with pytest.raises(UnknownTarget, match=message):
        find_target(name)


@pytest.mark.skipif(find_spec("jax_cuda12_plugin") is not None, reason="jax's CUDA plugin is here")
def test_absent_gpus_without_the_plugin_name_the_extra_that_brings_it():
    with pytest.raises(UnknownTarget, match=r"cannot compile for gpu:h100:8.*noria\[gpu-compile\]"):
        find_target("gpu:h100:8")
