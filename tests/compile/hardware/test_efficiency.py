"""Efficiencies: shares of the peaks by rows, seconds of calls and steps, and their evidence."""

import re
import tomllib
from dataclasses import replace
from importlib import resources

import pytest
from alike import alike
from decode_steps import step_of
from planning_models import PLAIN as DENSE
from planning_models import work_of

from noria.compile import hardware
from noria.compile.hardware.efficiency import AT_PEAKS, Efficiency, Shares
from noria.compile.hardware.hardware import Hardware, read_hardware
from noria.compile.planning.cost import CostModel
from noria.sharding.call import Call

MINE = Hardware("mine", "made up", {"float32": 1e9, "int8": 1e9}, 1e9, 1e8, 1e7, [])
CALLS = (Call("prefill", 2, 32, 32), Call("chunk", 2, 8, 32), step_of(4, 64))
FIGURES = {
    "evidence": "measured",
    "device": "mine",
    "jax": "0.11.2",
    "date": "2026-11",
    "call_seconds": 1e-3,
    "products": {"float32": {"rows": [4, 64], "share": [0.5, 0.25]}},
    "attention": {"decode": 0.5},
    "score_bytes": {"chunk": 12.0},
}
PUBLISHED = tomllib.loads((resources.files(hardware) / "hardware.toml").read_text("utf-8"))


def cost_of(**figures) -> CostModel:
    hardware = replace(MINE, efficiency=replace(AT_PEAKS, **figures))
    return CostModel(work_of(DENSE), hardware)


def parts_of(call, **figures) -> dict[str, float]:
    return dict(cost_of(**figures).estimate(call).parts)


def test_a_share_is_interpolated_in_the_logarithm_of_rows_and_constant_beyond():
    shares = Shares((4, 64), (0.5, 0.25))
    assert shares(16) == pytest.approx(0.375)
    assert (shares(1), shares(0.5), shares(1000)) == (0.5, 0.5, 0.25)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.phase)
@pytest.mark.parametrize(
    ("part", "figures"),
    [
        ("products", {"products": {"float32": Shares((1,), (0.25,))}}),
        ("logits", {"logits": {"float32": Shares((1,), (0.25,))}}),
        ("attention", {"attention": dict.fromkeys(("prefill", "chunk", "decode"), 0.25)}),
        ("activations", {"activations": 0.25}),
    ],
)
def test_a_share_divides_the_seconds_of_its_part_alone(call, part, figures):
    before, after = parts_of(call), parts_of(call, **figures)
    assert after.pop(part) == pytest.approx(4 * before.pop(part))
    assert after == before


def test_rows_of_products_are_those_of_a_device():
    shares = {"float32": Shares((8, 64), (0.5, 1.0))}
    prompts, step = CALLS[0], CALLS[2]
    for call, share in ((prompts, 1.0), (step, 0.5)):
        ratio = parts_of(call)["products"] / parts_of(call, products=shares)["products"]
        assert ratio == pytest.approx(share)


def test_a_dtype_that_was_not_measured_has_the_shares_of_the_first():
    shares = {"bfloat16": Shares((1,), (0.5,)), "int8": Shares((1,), (0.1,))}
    assert AT_PEAKS.share("products", "decode", "float32", 4) == 1
    efficiency = replace(AT_PEAKS, products=shares)
    assert efficiency.share("products", "decode", "float32", 4) == 0.5
    assert efficiency.share("experts", "decode", "int8", 4) == 0.1


def test_scores_and_logits_that_pass_through_memory_take_its_time():
    step = CALLS[2]
    scores = 4 * 64 * alike(DENSE).num_query_heads * DENSE.num_layers
    more = parts_of(step, score_bytes={"decode": 10.0})["attention"] - parts_of(step)["attention"]
    assert more == pytest.approx(scores * 10 / MINE.memory_rate)
    more = parts_of(step, logit_bytes=10.0)["logits"] - parts_of(step)["logits"]
    assert more == pytest.approx(4 * DENSE.vocab_size * 10 / MINE.memory_rate)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.phase)
def test_calls_steps_and_layers_have_seconds_of_their_own(call):
    cost = cost_of(call_seconds=8.0, step_seconds=1.0, layer_seconds=0.5)
    own = 1.0 if call.phase == "decode" else 8.0
    overhead = own + 0.5 * DENSE.num_layers
    assert cost.estimate(call).parts["overhead"] == overhead
    assert cost.seconds(call) == pytest.approx(sum(parts_of(call).values()) + overhead)
    assert cost.decode_call_seconds() == 8.0


def test_an_efficiency_is_read_as_it_is_written():
    efficiency = Efficiency.from_table("mine", FIGURES)
    assert Efficiency.from_table("mine", efficiency.to_table()) == efficiency
    assert efficiency.describe() == "measured mine, jax 0.11.2"
    table = replace(MINE, efficiency=efficiency).to_table()
    assert read_hardware({"mine": table})["mine"].efficiency == efficiency
    assert replace(MINE, efficiency=efficiency).peaks() == MINE.to_table()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("evidence", "guessed", "expected one of measured, compiler's cycles, published peaks"),
        ("jax", "", "expected the device, the jax version and the date"),
        ("date", 2026, "date: expected a string, got 2026"),
        ("call_seconds", -1.0, "call_seconds: expected a number from 0 up"),
        ("activations", 0, "activations: expected a number above 0"),
        ("attention", {"decode": 0}, "attention.decode: expected a number above 0"),
        ("attention", {"fork": 1}, "attention: expected the keys"),
        ("score_bytes", 3, "score_bytes: expected a table"),
        ("products", 3, "products: expected a table by dtype"),
        ("products", {"float32": {"rows": [4, 4], "share": [1, 1]}}, "expected growing numbers"),
        ("products", {"float32": {"rows": [4], "share": [1, 1]}}, "expected growing numbers"),
        ("products", {"float32": {"rows": [], "share": []}}, "expected growing numbers"),
        ("products", {"float32": {"rows": [4], "share": [0]}}, "share: expected a number above 0"),
        ("speed", 1, "unknown ['speed']"),
    ],
)
def test_a_figure_that_cannot_be_is_refused_by_name(key, value, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Efficiency.from_table("hardware mine.efficiency", {**FIGURES, key: value})


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_kind_of_device_has_a_price_of_a_call_and_of_a_step_with_its_source(name):
    efficiency = read_hardware(PUBLISHED)[name].efficiency
    assert efficiency.call_seconds > efficiency.step_seconds > 0
    assert efficiency.source
    if efficiency.evidence == "measured":
        assert re.fullmatch(r"\d{4}-\d{2}", efficiency.date)


def test_evidence_says_what_seconds_are_made_from():
    hardware = read_hardware(PUBLISHED)
    assert hardware["h200"].evidence == "measured h200, jax 0.11.2"
    assert hardware["h100"].evidence == "published peaks"
    assert hardware["v5e"].evidence == "compiler's cycles"
    assert replace(MINE, source="assumed by me").evidence == "assumed peaks"


def test_reads_of_pages_have_a_share_of_their_own_that_is_assumed_until_it_is_measured():
    step = Call("decode", 4, 1, 64, entries=192, page=16)
    peaks = parts_of(step, attention={"pages": 1.0})["attention"]
    assert parts_of(step, attention={"pages": 0.5})["attention"] == pytest.approx(2 * peaks)
    assert parts_of(step)["attention"] == pytest.approx(peaks / 0.83)
    slow = parts_of(step, attention={"decode": 0.5})["attention"]
    assert slow == pytest.approx(2 * peaks), "no faster than reads of a cache without pages"


def test_evidence_says_that_the_rate_of_reads_of_pages_is_assumed():
    assert cost_of().evidence_of(has_pages=True) == "published peaks, reads of pages assumed"
    assert cost_of().evidence_of(has_pages=False) == "published peaks"
    named = cost_of().evidence_of("cpu.json", has_pages=True)
    assert named == "published peaks cpu.json, reads of pages assumed"
    measured = cost_of(attention={"pages": 0.6})
    assert measured.evidence_of(has_pages=True) == "published peaks"
