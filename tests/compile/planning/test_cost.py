"""Seconds from work: the roofline by hand, and factors recovered from synthetic times."""

import json
from dataclasses import replace

import numpy as np
import pytest
from decode_steps import step_of
from planning_models import PLAIN, SPARSE, work_of

from noria.compile.abstract_model import AbstractModel
from noria.compile.hardware.hardware import Hardware
from noria.compile.planning.cost import Calibration, CallTiming, CostModel, KindFactors, calibrate
from noria.compile.planning.work import Work
from noria.compile.weight_rules import WeightRules
from noria.modelzoo.weights.weight_formats import WeightFormat
from noria.sharding.call import KINDS, Call
from noria.sharding.layout import Layout

HARDWARE = Hardware("mine", "made up", {"float32": 1e9}, 1e9, 1e8, 1e7, [])
CALLS = [
    *(Call("prefill", rows, length, length) for rows in (1, 4, 16) for length in (16, 128, 1024)),
    *(
        Call("chunk", rows, 64, 1024, entries=rows * length)
        for rows in (1, 4, 16)
        for length in (64, 256, 1024)
    ),
    *(step_of(slots, length) for slots in (1, 8, 32, 64) for length in (64, 512, 4096)),
]


def test_a_part_takes_its_products_or_its_memory_whichever_is_longer():
    model = CostModel(work_of(PLAIN), HARDWARE)
    for call in CALLS:
        estimate = model.estimate(call)
        for part in model.work.parts(call):
            expected = max(part.flops / 1e9, part.bytes / 1e8)
            assert estimate.parts[part.name] == pytest.approx(expected)
        assert model.seconds(call) == pytest.approx(sum(estimate.parts.values()))
        assert sum(estimate.limits.values()) == pytest.approx(estimate.seconds)
        assert estimate.limits[estimate.binds] == max(estimate.limits.values())


def test_the_causes_of_seconds_are_products_weights_cache_and_collectives():
    model = CostModel(work_of(PLAIN), HARDWARE)
    for call in CALLS:
        parts, expected = {part.name: part for part in model.work.parts(call)}, {}
        for name, causes in {
            "products": ("products", "weights"),
            "logits": ("products", "weights"),
            "attention": ("attention", "cache"),
            "activations": ("activations", "activations"),
        }.items():
            if part := parts.get(name):
                compute, memory = part.flops / 1e9, part.bytes / 1e8
                cause = causes[compute < memory]
                expected[cause] = expected.get(cause, 0.0) + max(compute, memory)
        assert model.estimate(call).causes == pytest.approx(expected)


def test_collectives_are_causes_by_kind_and_axes():
    table = {"name": "x", "mesh": {"data": 2, "tensor": 2}, "rules": {"mlp": "tensor"}}
    table["rules"] |= {"batch": "data", "query_heads": "tensor"}
    model = CostModel(work_of(PLAIN, Layout.from_table(table)), HARDWARE)
    call = Call("prefill", 4, 64, 64)
    (exchanges,) = (part for part in model.work.parts(call) if part.name == "exchanges")
    expected = {
        f"{kind} along {'+'.join(axes)}": n / 1e7 for (kind, axes), n in exchanges.sent.items()
    }
    causes = model.estimate(call).causes
    assert "all-reduce along tensor" in expected
    assert {name: causes[name] for name in expected} == pytest.approx(expected)
    assert model.estimate(call).limits["network"] == pytest.approx(sum(expected.values()))


def test_weights_that_are_copied_first_take_the_time_of_the_copies_too():
    work = work_of(PLAIN)
    once, copied = (CostModel(work, replace(HARDWARE, weight_passes=passes)) for passes in (1, 3))
    for call in CALLS:
        more = {part.name: 2 * part.weight_bytes / 1e8 for part in work.parts(call)}
        assert more["attention"] == more["activations"] == 0
        assert more["products"] == pytest.approx(
            2 * work.needed(call).weights / 1e8 - more["logits"]
        )
        expected = {name: s + more[name] for name, s in once.estimate(call).parts.items()}
        assert copied.estimate(call).parts == pytest.approx(expected)


def test_one_row_waits_for_memory_and_many_for_products():
    model = CostModel(work_of(PLAIN), HARDWARE)
    assert model.estimate(step_of(1, 64)).binds == "memory"
    assert model.estimate(Call("prefill", 16, 128, 128)).binds == "compute"


@pytest.mark.parametrize("config", [PLAIN, SPARSE], ids=["dense", "experts"])
def test_products_of_int8_take_the_peak_of_int8(config):
    """Experts, attention, routers and the head take the peak of the run's dtype."""
    rules = WeightRules(WeightFormat("int8"), rounds_activations=True)
    work = Work(AbstractModel(config, weight_rules=rules), "float32")
    hardware = replace(HARDWARE, flops={"float32": 1e9, "int8": 4e9}, memory_rate=1e15)
    call, plain = Call("prefill", 16, 128, 128), CostModel(work_of(config), hardware)
    got, wanted = (model.estimate(call).parts for model in (CostModel(work, hardware), plain))
    for name, seconds in wanted.items():
        assert got[name] == pytest.approx(seconds / (4 if name == "products" else 1), rel=0.1)
    with pytest.raises(ValueError, match="mine: expected a rate for int8"):
        CostModel(work, HARDWARE).estimate(call)


def test_what_is_sent_takes_its_time_too():
    rules = {"query_heads": "tensor", "mlp": "tensor", "vocab": "tensor"}
    layout = Layout.from_table(
        {"name": "weight-stationary-1d", "mesh": {"tensor": 2}, "rules": rules}
    )
    model = CostModel(work_of(PLAIN, layout), HARDWARE)
    call = Call("prefill", 4, 32, 32)
    sent = sum(sum(part.sent.values()) for part in model.work.parts(call))
    assert model.estimate(call).limits["network"] == pytest.approx(sent / 1e7)


def test_a_mesh_axis_of_two_dimensions_of_a_torus_sends_twice_as_fast():
    table = {
        "name": "planes",
        "mesh": {"tensor": 4},
        "rules": {"query_heads": "tensor", "kv_heads": "", "mlp": "tensor", "vocab": "tensor"},
    }
    work, call = work_of(PLAIN, Layout.from_table(table)), Call("prefill", 4, 32, 32)
    line, plane = (
        CostModel(work, HARDWARE, torus=torus).estimate(call).limits["network"]
        for torus in ((), (2, 2))
    )
    assert line == 2 * plane > 0


def test_an_all_to_all_is_priced_by_its_way_over_a_ring_of_devices():
    """On a ring of eight, pieces go a quarter of the way over two links: 1 instead of 7 / 8."""
    table = {
        "name": "rows for heads",
        "mesh": {"tensor": 8},
        "rules": {"query_heads": "tensor", "mlp": "tensor", "attention_batch": "tensor"},
    }
    work, call = work_of(PLAIN, Layout.from_table(table)), Call("prefill", 8, 32, 32)
    (sent,) = (part.sent for part in work.parts(call) if part.sent)
    kinds = ("all-to-all", "all-reduce", "all-gather")
    exchanged, summed, gathered = (sent[kind, ("tensor",)] for kind in kinds)
    hardware = replace(HARDWARE, wraps=[8])
    on_ring = CostModel(work, hardware, torus=(8,)).estimate(call).limits["network"]
    assert on_ring == pytest.approx((exchanged * 8 / 7 + (summed + gathered) / 2) / 1e7)
    through_switch = CostModel(work, hardware).estimate(call).limits["network"]
    assert through_switch == pytest.approx((exchanged + summed + gathered) / 1e7)


def made_up(
    overhead: float, factors: dict[str, float], hardware: Hardware = HARDWARE
) -> list[CallTiming]:
    """Times of a machine that differs from the roofline by exactly these factors."""
    model = CostModel(work_of(PLAIN), hardware)
    return [
        CallTiming(
            call,
            overhead
            + sum(factors[name] * seconds for name, seconds in model.estimate(call).parts.items()),
        )
        for call in CALLS
    ]


FACTORS = {"products": 1.5, "attention": 4.0, "logits": 1.0, "activations": 2.0}


def fitted(measured: list[CallTiming]) -> Calibration:
    work = work_of(PLAIN)
    return calibrate(work, HARDWARE, measured, model="sha256:0", layout="")


def test_a_calibration_finds_the_factors_of_a_machine_and_predicts_other_calls():
    calibration = fitted(made_up(0.01, FACTORS))
    assert calibration.median_error < 1e-6
    model = CostModel(work_of(PLAIN), HARDWARE, calibration)
    plain = CostModel(work_of(PLAIN), HARDWARE)
    for call in (Call("prefill", 3, 300, 300), step_of(24, 1000)):
        parts = plain.estimate(call).parts
        expected = 0.01 + sum(FACTORS[name] * seconds for name, seconds in parts.items())
        # the fit cannot separate the factors of parts that grow together
        assert model.seconds(call) == pytest.approx(expected, rel=1e-3)


def test_a_calibration_finds_where_memory_takes_over_from_products():
    slow = replace(HARDWARE, memory_rate=HARDWARE.memory_rate / 2)
    calibration = fitted(made_up(0.01, FACTORS, slow))
    assert calibration.kinds["decode"].memory == 2
    model = CostModel(work_of(PLAIN), HARDWARE, calibration)
    truth = CostModel(work_of(PLAIN), slow).estimate(step_of(24, 1000)).parts
    expected = 0.01 + sum(FACTORS[name] * seconds for name, seconds in truth.items())
    assert model.seconds(step_of(24, 1000)) == pytest.approx(expected, rel=1e-3)


def test_factors_are_never_negative_and_the_error_of_a_noisy_machine_is_told():
    rng = np.random.default_rng(0)
    noisy = [
        CallTiming(one.call, one.seconds * rng.uniform(0.7, 1.3)) for one in made_up(0.01, FACTORS)
    ]
    calibration = fitted(noisy)
    for kind in calibration.kinds.values():
        assert kind.overhead >= 0
        assert all(factor >= 0 for factor in kind.factors.values())
    assert 0.01 < calibration.median_error < 0.3


def test_a_calibration_survives_its_file_and_refuses_other_keys():
    calibration = fitted(made_up(0.01, FACTORS))
    table = json.loads(json.dumps(calibration.to_json()))
    assert Calibration.from_json(table) == calibration
    with pytest.raises(ValueError, match="colour"):
        Calibration.from_json(table | {"colour": "red"})
    del table["kinds"]["chunk"]["overhead"]
    with pytest.raises(ValueError, match="overhead"):
        Calibration.from_json(table)


@pytest.mark.parametrize("value", ["1", None, -1, float("nan"), float("inf"), True])
def test_figures_of_a_calibration_that_cannot_be_are_refused_by_name(value):
    table = json.loads(json.dumps(fitted(made_up(0.01, FACTORS)).to_json()))
    found = table["kinds"]["decode"]
    for name in ("overhead", "first_call", "memory"):
        wrong = table | {"kinds": table["kinds"] | {"decode": found | {name: value}}}
        with pytest.raises(ValueError, match=f"kinds.decode.{name}: expected a number from 0 up"):
            Calibration.from_json(wrong)
    wrong = table | {"kinds": table["kinds"] | {"decode": found | {"factors": {"head": value}}}}
    with pytest.raises(ValueError, match=r"kinds\.decode\.head: expected a number"):
        Calibration.from_json(wrong)
    with pytest.raises(ValueError, match="median_error: expected a number"):
        Calibration.from_json(table | {"median_error": value})


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_was_not_measured_is_refused(kind):
    others = [one for one in made_up(0, FACTORS) if one.call.phase != kind]
    with pytest.raises(ValueError, match=kind):
        fitted(others)


def test_the_first_call_of_a_graph_takes_longer_by_the_median_of_what_was_seen():
    extra = dict(zip(KINDS, (0.3, 0.2, -0.1), strict=True))
    calibration = fitted(
        [replace(one, first_call=extra[one.call.phase]) for one in made_up(0, FACTORS)]
    )
    assert [calibration.kinds[kind].first_call for kind in KINDS] == [0.3, 0.2, 0.0]
    model = CostModel(work_of(PLAIN), HARDWARE, calibration)
    assert model.first_call_seconds(Call("prefill", 1, 8, 8)) == 0.3
    assert CostModel(work_of(PLAIN), HARDWARE).first_call_seconds(Call("prefill", 1, 8, 8)) == 0


def test_calibrated_overhead_is_no_parts():
    factors = {kind: KindFactors(0.5) for kind in KINDS}
    calibration = Calibration("m", "float32", {}, "", factors, 0.0)
    model = CostModel(work_of(PLAIN), HARDWARE, calibration)
    call = Call("prefill", 1, 64, 64)
    plain = CostModel(work_of(PLAIN), HARDWARE)
    assert model.seconds(call) == pytest.approx(plain.seconds(call) + 0.5)
    assert model.estimate(call).limits["overhead"] == 0.5
