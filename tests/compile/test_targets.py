"""Targets: their names, their devices, and the errors for unknown names."""

from importlib.util import find_spec
from itertools import product

import jax
import pytest
from jax.experimental import topologies

from noria.compile.target_names import TargetName
from noria.compile.targets import UnknownTarget, find_target

SMALL = [
    shape
    for rank, most in ((1, 9), (2, 9), (3, 5), (4, 2))
    for shape in product(range(1, most + 1), repeat=rank)
]
"""Sizes of slices, real or not."""

TORUS_2D = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
TORUS_3D = ("2x2x1", "2x2x2", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16", "8x16x16")
PUBLISHED = {
    "v4": (*TORUS_3D, "2x2x4", "12x12x24"),
    "v5e": TORUS_2D,
    "v5p": (*TORUS_3D, "16x16x16", "16x16x24"),
    "v6e": TORUS_2D,
}
"""Slices as listed on the pages of docs.cloud.google.com/tpu/docs."""


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
        "tpu:v5e:8",
        "tpu:v5p:2x2x2x2",
        3,
    ],
)
def test_a_name_of_no_known_platform_is_refused_with_the_names_that_are(name):
    message = f"expected cpu, gpu, tpu, a number of them .*, got {name!r}"
    with pytest.raises(UnknownTarget, match=message):
        find_target(name)
    with pytest.raises(UnknownTarget, match=message):
        TargetName.parse(name)


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
    assert len(find_target(name).devices) == TargetName.parse(name).num_devices == 16


@pytest.mark.tpu_compile
def test_an_unknown_generation_is_refused_with_one_that_exists():
    message = "no topology 'v9:2x4'.*Expected for example tpu:v5e:2x4"
    with pytest.raises(UnknownTarget, match=f"(?s){message}"):
        find_target("tpu:v9:2x4")


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tpu:v5e:3x5", "tpu:v5e:2x4 or tpu:v5e:4x8"),
        ("tpu:v5p:3x3x3", "tpu:v5p:2x2x2 or tpu:v5p:4x4x4"),
        ("tpu:v5p:15x16x24", "tpu:v5p:12x16x24 or tpu:v5p:16x16x24"),
        ("tpu:v6e:1x7", "tpu:v6e:1x4 or tpu:v6e:1x8"),
    ],
)
def test_a_slice_of_no_whole_blocks_is_refused_by_its_name_with_the_nearest(name, nearest):
    message = f"whole blocks of 2x2 chips, .* got {name}. Ask for {nearest}."
    with pytest.raises(UnknownTarget, match=message):
        TargetName.parse(name)
    with pytest.raises(UnknownTarget, match=message):
        find_target(name)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", ["v4", "v5e", "v5p", "v6e"])
def test_slices_are_those_that_libtpu_takes(generation):
    find_target(f"tpu:{generation}:2x2x1")  # this sets the environment for libtpu

    def is_named(name: str) -> bool:
        try:
            return TargetName.parse(f"tpu:{name}").num_devices > 0
        except UnknownTarget:
            return False

    def is_taken(name: str) -> bool:
        try:
            return bool(topologies.get_topology_desc(name, "tpu").devices)
        except jax.errors.JaxRuntimeError:
            return False

    published = [f"{generation}:{shape}" for shape in PUBLISHED[generation]]
    small = [f"{generation}:{'x'.join(map(str, shape))}" for shape in SMALL]
    assert all(map(is_named, published))
    assert {name: is_named(name) for name in small} == {name: is_taken(name) for name in small}


@pytest.mark.parametrize("name", ["gpu:b1:8", "gpu:h100:12"])
def test_gpus_that_no_host_has_are_refused_with_those_that_are_known(name):
    message = f"no GPUs {name!r}.*gpu:h100:8: a kind of a100, h100, h200, up to 8"
    with pytest.raises(UnknownTarget, match=message):
        find_target(name)


@pytest.mark.skipif(find_spec("jax_cuda12_plugin") is not None, reason="jax's CUDA plugin is here")
def test_absent_gpus_without_the_plugin_name_the_extra_that_brings_it():
    with pytest.raises(UnknownTarget, match=r"cannot compile for gpu:h100:8.*noria\[gpu-compile\]"):
        find_target("gpu:h100:8")
