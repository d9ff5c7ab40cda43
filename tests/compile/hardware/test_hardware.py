"""Tables of hardware: every figure has a source, and a wrong figure is refused by name."""

import math

import pytest

from noria.compile.hardware.hardware import UnknownHardware, hardware_of, read_hardware
from noria.compile.target_names import TargetName
from noria.runtime.errors import ConfigError
from noria.runtime.files.hardware_files import known_hardware

GOOD = {
    "source": "a datasheet",
    "flops": {"bfloat16": 100e12},
    "memory_bytes": 32e9,
    "memory_rate": 1e12,
    "link_rate": 50e9,
    "wraps": [16],
}
PRICED = GOOD | {"price_per_hour": 1.2}


def test_every_published_device_names_its_source_and_the_dtypes_of_plans():
    for device in known_hardware().values():
        assert len(device.source) > 20
        assert set(device.flops) == {"bfloat16", "float32", "int8"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("source", 3),
        ("wraps", 16),
        ("wraps", "16"),
        ("wraps", [1]),
        ("wraps", [16.0]),
        ("wraps", [True]),
        ("wraps", [4, 8]),
        ("memory_rate", 0),
        ("memory_rate", -1.0),
        ("flops", {}),
        ("flops", {"bfloat16": float("nan")}),
        ("flops", 3.0),
        ("link_rate", "fast"),
        ("clock", 0),
        ("clock", "1.5 GHz"),
        ("weight_passes", 0),
        ("weight_passes", 1.5),
        ("price_per_hour", 0),
    ],
)
def test_a_figure_that_cannot_be_is_refused_by_name(key, value):
    with pytest.raises(ValueError, match=key):
        read_hardware({"mine": GOOD | {key: value}})


def test_every_tpu_has_a_clock_that_fits_its_peak_and_nothing_else_has_one():
    """A cycle of a generation's matrix units makes a power of two of operations."""
    clocks = {name: device.clock for name, device in known_hardware().items() if device.clock}
    assert set(clocks) == {"v4", "v5e", "v5p", "v6e"}
    for name, clock in clocks.items():
        of_cycle = math.log2(known_hardware()[name].peak("bfloat16") / clock)
        assert of_cycle == pytest.approx(round(of_cycle), abs=0.01)


def test_published_tables_have_no_prices():
    assert {device.price_per_hour for device in known_hardware().values()} == {None}


def test_a_table_with_optional_figures_and_one_without_are_read_as_they_are_written():
    for table in (GOOD, GOOD | {"clock": 1.5e9}, GOOD | {"weight_passes": 3}, PRICED):
        assert read_hardware({"mine": table})["mine"].to_table() == table


def test_keys_must_be_exactly_those_of_a_device():
    with pytest.raises(ValueError, match="watts"):
        read_hardware({"mine": GOOD | {"watts": 3}})
    with pytest.raises(ValueError, match="source"):
        read_hardware({"mine": {key: GOOD[key] for key in GOOD if key != "source"}})


@pytest.mark.parametrize(
    ("target", "count"),
    [
        ("cpu", 1),
        ("cpu:8", 8),
        ("gpu:8", 8),
        ("tpu:v5e:2x4", 8),
        ("tpu:v5p:4x4x8", 128),
        ("gpu:h100:8", 8),
    ],
)
def test_a_targets_name_says_how_many_devices_it_has(target, count):
    assert TargetName.parse(target).num_devices == count


def test_a_kind_must_be_named_as_predictions_are_made_from_its_peaks():
    for target in ("tpu:8", "gpu"):
        with pytest.raises(UnknownHardware, match=r"Name the generation.*tpu:v5e:2x4.*--kind"):
            hardware_of(target, known_hardware())


def test_accelerators_of_this_machine_have_the_table_of_the_kind_that_is_named():
    known = known_hardware()
    assert hardware_of("gpu", known, "h100") == hardware_of("gpu:h100:1", known)
    with pytest.raises(UnknownHardware, match=r"got 'v9'.*--hardware FILE"):
        hardware_of("tpu:8", known, "v9")
    for target, named in (("cpu:8", "cpu"), ("gpu:h100:8", "h100")):
        with pytest.raises(UnknownHardware, match=f"the target names {named}, got 'v5e'"):
            hardware_of(target, known, "v5e")


def test_simulated_devices_share_the_machine():
    known = known_hardware()
    whole, part = hardware_of("cpu", known), hardware_of("cpu:4", known)
    assert part.memory_bytes == whole.memory_bytes / 4
    assert part.peak("float32") == whole.peak("float32") / 4
    assert hardware_of("tpu:v5e:2x4", known) == known["v5e"]


def test_unknown_hardware_and_dtypes_are_refused_with_what_there_is():
    known = known_hardware()
    with pytest.raises(UnknownHardware, match=r"v5e.*got 'v9'.*\[v9\] of your own"):
        hardware_of("tpu:v9:2x4", known)
    with pytest.raises(ValueError, match="int4"):
        known["v5e"].peak("int4")


def test_a_users_table_replaces_the_published_one_and_adds_others(tmp_path):
    path = tmp_path / "mine.toml"
    table = "\n".join(
        [
            'source = "measured"',
            "flops = { bfloat16 = 1e12 }",
            "memory_bytes = 1e9",
            "memory_rate = 1e9",
            "link_rate = 1e9",
            "wraps = []",
        ]
    )
    path.write_text(f"[v5e]\n{table}\n[mine]\n{table}\n")
    known = known_hardware(path)
    assert known["v5e"].source == known["mine"].source == "measured"
    assert hardware_of("gpu:mine:4", known) == known["mine"]
    path.write_text("[v5e]\nsource = 1\n")
    with pytest.raises(ConfigError, match="v5e"):
        known_hardware(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match=f"^{path}: expected TOML"):
        known_hardware(path)


def test_a_tpu_is_a_torus_and_other_targets_have_none():
    assert TargetName.parse("tpu:v4:4x4x8").torus == (4, 4, 8)
    assert all(TargetName.parse(name).torus == () for name in ("gpu:h100:8", "cpu:8", "tpu:8"))


@pytest.mark.parametrize(
    ("target", "wanted"),
    [
        ("tpu:v5e:2x4", [False, False]),
        ("tpu:v5e:8x16", [False, True]),
        ("tpu:v6e:8x8", [False, False]),
        ("tpu:v6e:16x16", [True, True]),
        ("tpu:v4:4x4x4", [True, True, True]),
        ("tpu:v4:4x4x2", [False, False, False]),
        ("tpu:v5p:2x4x4", [False, False, False]),
        ("tpu:v5p:4x4x12", [True, True, True]),
    ],
)
def test_links_wrap_along_whole_sides_of_a_pod_or_in_whole_cubes(target, wanted):
    """As published: "How to Scale Your Model", part 2, TPU networking, and its footnotes."""
    assert hardware_of(target, known_hardware()).rings(TargetName.parse(target).torus) == wanted


@pytest.mark.parametrize(
    ("name", "cores", "hertz"), [("a100", 6912, 1.41e9), ("h100", 16896, 1.98e9)]
)
def test_float32_products_on_gpus_are_true_float32(name, cores, hertz):
    """In compiled graphs each core multiplies and adds once a cycle, without tensor cores."""
    assert known_hardware()[name].peak("float32") == pytest.approx(2 * cores * hertz, rel=0.01)
