"""Targets: names, what they lead to, and what is said of those that lead nowhere."""

import jax
import pytest

from noria.compile.targets import UnknownTarget, find_target


def test_cpu_is_the_first_device_of_this_machine():
    target = find_target("cpu")
    assert target.is_present
    assert target.platform == "cpu"
    assert target.sharding.device_set == {jax.devices("cpu")[0]}


@pytest.mark.parametrize("name", ["", "CPU", "cuda", "v5e:2x4", "gpu0", "cpu:", "tpu:"])
def test_a_name_of_no_known_platform_is_refused_with_the_names_that_are(name):
    message = f"expected cpu, gpu, tpu or tpu:<generation>:<topology>, got {name!r}"
    with pytest.raises(UnknownTarget, match=message):
        find_target(name)


@pytest.mark.parametrize("name", ["cpu:8", "gpu:h100:8"])
def test_several_devices_are_refused_by_name(name):
    with pytest.raises(UnknownTarget, match=f"takes one device in this version, got '{name}'"):
        find_target(name)


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
    assert len(target.sharding.device_set) == 8
    assert target.sharding.is_fully_replicated


@pytest.mark.tpu_compile
def test_an_unknown_topology_is_refused_with_one_that_exists():
    message = "no topology 'v5e:3x5'.*Expected for example tpu:v5e:2x4"
    with pytest.raises(UnknownTarget, match=f"(?s){message}"):
        find_target("tpu:v5e:3x5")
