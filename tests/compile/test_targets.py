"""Targets: their names, their devices, and the errors for unknown names."""

import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace

import jax
import pytest

from noria.compile.device_kinds import GPU_KINDS, TPU_KINDS, kind_of
from noria.compile.target_names import TargetName
from noria.compile.targets import UnknownTarget, find_target, present_target

SMALL = [
    shape
    for rank, most in ((1, 9), (2, 9), (3, 5), (4, 2))
    for shape in product(range(1, most + 1), repeat=rank)
]
"""Sizes of slices, real or not."""

NAMES = {
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H200": "h200",
    "NVIDIA H200 141GB HBM3e": "h200",
}
"""Kinds by the names that their devices report."""
OTHER_NAMES = ("cpu", "TPU v5x", "NVIDIA H100 PCIe", "NVIDIA H100 NVL", "NVIDIA A100-SXM4-40GB")

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
    show(monkeypatch, *gpus("NVIDIA H200", 2))
    message = r"gpu:3 needs 3 devices, got 2 of kind gpu\. Ask for as many as there are\.$"
    with pytest.raises(UnknownTarget, match=message):
        find_target("gpu:3")


@pytest.mark.parametrize("name", ["gpu", "tpu"])
def test_a_platform_that_is_not_here_names_the_remedy(name):
    if any(device.platform == name for device in jax.devices()):
        pytest.skip(f"this machine has a {name}")
    with pytest.raises(UnknownTarget, match=f"'{name}' is not on this machine.*--target cpu"):
        find_target(name)


def gpus(name: str, count: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(device_kind=name) for _ in range(count)]


def tpus(name: str, *sizes: int) -> list[SimpleNamespace]:
    """Stand-ins for the devices of a slice that begins at chip 4, 4, 0 of its pod."""
    places = product(*(range(size) for size in (*sizes, 1, 1)[:3]))
    return [SimpleNamespace(device_kind=name, coords=(4 + x, 4 + y, z)) for x, y, z in places]


def show(monkeypatch: pytest.MonkeyPatch, *devices: SimpleNamespace, processes: int = 1) -> None:
    """Let this machine, or all processes of a pod together, have these devices."""
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    for function in ("local_devices", "devices"):
        is_whole = (function == "devices") == (processes > 1)
        found = devices if is_whole else devices[: len(devices) // processes]
        monkeypatch.setattr(jax, function, lambda backend, found=found: list(found))


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_the_kind_of_devices_is_read_from_their_name(name, kind):
    assert kind_of(gpus(name, 4)) == kind


def test_every_name_of_a_kind_is_tested_and_no_other_name_has_a_kind():
    known = {
        name for kinds in (TPU_KINDS, GPU_KINDS) for k in kinds.values() for name in k.device_names
    }
    assert known == set(NAMES)
    assert {kind_of(gpus(name, 1)) for name in OTHER_NAMES} == {None}
    assert kind_of(gpus("NVIDIA H200", 1) + gpus("NVIDIA H100 80GB HBM3", 1)) is None
    assert kind_of([]) is None


@pytest.mark.parametrize("processes", [1, 4])
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        *((f"gpu:{NAMES[name]}:4", gpus(name, 4)) for name in NAMES if "NVIDIA" in name),
        *((f"tpu:{NAMES[name]}:2x4", tpus(name, 2, 4)) for name in NAMES if name[-1] == "e"),
        ("tpu:v5e:2x4", tpus("TPU v5e", 4, 2)),
        ("tpu:v4:2x2x4", tpus("TPU v4", 2, 2, 4)),
        ("tpu:v5p:2x2x1", tpus("TPU v5p", 2, 2)),
        ("tpu:v6e:4x4", gpus("TPU v6 lite", 16)),  # without coordinates
    ],
    ids=str,
)
def test_rows_run_on_devices_of_the_kind_that_a_target_names(name, devices, processes, monkeypatch):
    show(monkeypatch, *devices, processes=processes)
    target = present_target(name)
    assert target.is_present and target.devices == tuple(devices)
    assert (target.name, target.platform) == (name, name[:3])


def test_rows_of_one_process_run_on_the_first_devices_of_the_kind(monkeypatch):
    show(monkeypatch, *gpus("NVIDIA H200", 8))
    assert len(present_target("gpu:h200:2").devices) == 2
    show(monkeypatch, *tpus("TPU v5 lite", 2, 4))
    assert len(present_target("tpu:v5e:1x1").devices) == 1


@pytest.mark.parametrize(
    ("name", "devices", "here", "other"),
    [
        (
            "gpu:h200:1",
            gpus("NVIDIA H100 80GB HBM3", 1),
            "1 x NVIDIA H100 80GB HBM3 (h100)",
            "gpu:1",
        ),
        ("gpu:h200:1", gpus("NVIDIA L4", 1), "1 x NVIDIA L4 (of no known kind)", "gpu:1"),
        ("gpu:mine:1", gpus("NVIDIA L4", 1), "1 x NVIDIA L4 (of no known kind)", "gpu:1"),
        ("tpu:v5e:2x4", tpus("TPU v6 lite", 2, 4), "8 x TPU v6 lite (v6e, 2x4)", "tpu:8"),
        ("tpu:v6e:4x4", tpus("TPU v6 lite", 2, 8), "16 x TPU v6 lite (v6e, 2x8)", "tpu:16"),
    ],
)
def test_other_devices_are_named_with_those_of_the_target(name, devices, here, other, monkeypatch):
    show(monkeypatch, *devices)
    with pytest.raises(UnknownTarget) as caught:
        present_target(name)
    assert f"the devices of {name}, got {here}. " in str(caught.value)
    assert f"plan again for those of this one, or use --target {other} " in str(caught.value)


def test_too_few_devices_of_a_kind_are_named(monkeypatch):
    show(monkeypatch, *gpus("NVIDIA H200", 1))
    message = r"gpu:h200:8 needs 8 devices, got 1 x NVIDIA H200 \(h200\)\. Ask for as many"
    with pytest.raises(UnknownTarget, match=message):
        present_target("gpu:h200:8")


@pytest.mark.parametrize("name", ["gpu:h200:1", "tpu:v5e:2x4"])
def test_a_machine_without_the_platform_of_a_kind_names_the_remedy(name):
    if any(device.platform == name[:3] for device in jax.devices()):
        pytest.skip(f"this machine has a {name[:3]}")
    with pytest.raises(UnknownTarget, match=f"'{name}' is not on this machine.* plan again"):
        present_target(name)


@pytest.mark.tpu_compile
def test_a_tpu_topology_need_not_be_present():
    target = find_target("tpu:v5e:2x4")
    assert not target.is_present
    assert target.platform == "tpu"
    assert len(target.devices) == 8
    assert target.placement().replicated.is_fully_replicated


@pytest.mark.tpu_compile
@pytest.mark.parametrize("name", ["tpu:v4:2x2x4", "tpu:v5e:4x4", "tpu:v5p:2x2x4", "tpu:v6e:4x4"])
def test_a_topology_has_as_many_devices_as_its_name_says_and_they_are_of_its_kind(name):
    devices = find_target(name).devices
    assert len(devices) == TargetName.parse(name).num_devices == 16
    assert kind_of(devices) == TargetName.parse(name).kind


@pytest.mark.tpu_compile
@pytest.mark.parametrize("name", ["tpu:v4:1x1x1", "tpu:v5e:1x1", "tpu:v5p:1x1x1", "tpu:v6e:1x1"])
def test_programs_compile_for_one_chip(name):
    sharding = find_target(name).placement().replicated
    numbers = jax.ShapeDtypeStruct((8, 128), "float32", sharding=sharding)
    assert jax.jit(jax.numpy.exp).lower(numbers).compile().as_text()


@pytest.mark.tpu_compile
def test_jax_starts_the_cpu_alone_beside_an_absent_target():
    """The backends of absent devices cannot start; libtpu complains about it."""
    code = (
        "from noria.compile.targets import find_target; find_target('tpu:v5e:2x4'); "
        "import jax; print(jax.config.values['jax_platforms'], jax.devices()[0].platform)"
    )
    environment = {name: v for name, v in os.environ.items() if name != "JAX_PLATFORMS"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "cpu cpu\n"


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
        ("tpu:v5e:1x2", "tpu:v5e:2x2"),
        ("tpu:v5e:1x4", "tpu:v5e:2x2"),
        ("tpu:v5e:4x1", "tpu:v5e:2x2"),
        ("tpu:v6e:1x7", "tpu:v6e:2x2 or tpu:v6e:2x4"),
        ("tpu:v6e:1x8", "tpu:v6e:2x4"),
    ],
)
def test_a_slice_of_no_whole_blocks_is_refused_by_its_name_with_the_nearest(name, nearest):
    message = f"one chip, or .* whole blocks of 2x2 chips, .* got {name}. Ask for {nearest}."
    with pytest.raises(UnknownTarget, match=message):
        TargetName.parse(name)
    with pytest.raises(UnknownTarget, match=message):
        find_target(name)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("tpu:v5e:4x4x4", "2 dimensions and at most 16 chips along each"),
        ("tpu:v6e:16x32", "2 dimensions and at most 16 chips along each"),
        ("tpu:v6e:8x32", "2 dimensions and at most 16 chips along each"),
        ("tpu:v4:4x4", "3 dimensions and at most 4096 chips"),
        ("tpu:v4:16x16x24", "3 dimensions and at most 4096 chips"),
        ("tpu:v5p:16x20x28", "3 dimensions and at most 6144 chips"),
    ],
)
def test_a_slice_that_no_pod_has_is_refused_with_the_largest(name, wanted):
    with pytest.raises(UnknownTarget, match=f"{wanted}, got {name}. The largest is tpu:v.*16x16"):
        TargetName.parse(name)


def test_of_a_generation_without_facts_every_slice_of_whole_blocks_is_taken():
    assert TargetName.parse("tpu:mine:32x32x32").shape == (32, 32, 32)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", ["v4", "v5e", "v5p", "v6e"])
def test_every_slice_that_a_name_may_have_compiles(generation):
    def is_named(name: str) -> bool:
        try:
            return TargetName.parse(name).num_devices > 0
        except UnknownTarget:
            return False

    published = [f"tpu:{generation}:{shape}" for shape in PUBLISHED[generation]]
    small = [f"tpu:{generation}:{'x'.join(map(str, shape))}" for shape in SMALL]
    assert all(map(is_named, published))
    named = list(filter(is_named, [*published, *small]))
    sizes = [TargetName.parse(name).num_devices for name in named]
    assert [len(find_target(name).devices) for name in named] == sizes


def test_gpus_of_an_unknown_kind_are_refused_with_those_that_are_known():
    with pytest.raises(UnknownTarget, match=r"no GPUs 'gpu:b1:8'.* a kind of a100, h100, h200"):
        find_target("gpu:b1:8")


@pytest.mark.parametrize("count", [9, 10, 12, 15])
def test_gpus_of_hosts_that_are_not_full_are_refused(count):
    message = f"whole hosts of 8, got gpu:h100:{count}. Ask for gpu:h100:8 or gpu:h100:16."
    with pytest.raises(UnknownTarget, match=message):
        TargetName.parse(f"gpu:h100:{count}")


@pytest.mark.skipif(find_spec("jax_cuda12_plugin") is not None, reason="jax's CUDA plugin is here")
def test_absent_gpus_without_the_plugin_name_the_extra_that_brings_it():
    with pytest.raises(UnknownTarget, match=r"cannot compile for gpu:h100:8.*noria\[gpu-compile\]"):
        find_target("gpu:h100:8")
