"""Plans that keep weights in their published codes: what they keep, load and answer.

Every format of `published_formats` must pass. The reference is the same checkpoint read as float
weights, whose numbers are tested against the formats' references.
"""

from dataclasses import replace
from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from laid_out import VOCAB, LaidOut, expected_of, greedy_rows, layout_of
from published_formats import ACT_ORDER, FORMATS, PublishedForm, write_model
from test_dequantised_tensors import GPT_OSS, gpt_oss_tensors
from tiny_llama import CONFIG, random_tensors, save
from tolerances import FLOAT32_MODEL_LOGPROB

from noria.compile.abstract_model import AbstractModel, model_sizes
from noria.compile.plan import Numbers
from noria.compile.weight_rules import WeightRules
from noria.modelzoo.config import AS_PUBLISHED, Arrangement, DecoderConfig
from noria.modelzoo.weights.quantised_weight import QuantisedWeight
from noria.modelzoo.weights.weight_formats import (
    BYTE_DTYPES,
    OFFSETS,
    ORDER,
    SCALES,
    Quantisation,
    WeightFormat,
)
from noria.runtime.checkpoint import load_params, open_model, published_weight
from noria.runtime.checkpoint.published_numbers import keep_published, override_plan
from noria.runtime.checkpoint.published_weight import PublishedWeight
from noria.runtime.checkpoint.tensor_source import Interval
from noria.runtime.errors import CheckpointMismatch
from noria.sharding.legality import check

LLAMA = CONFIG | {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 8}
LLAMA |= {"vocab_size": VOCAB}
WEIGHTS = ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")
KEEP = Numbers("float32", "as_published")
FORMS = pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
ON_DEVICES = "data-tensor@data=2,tensor=4"


def saved(path, form: PublishedForm):
    """Write a small model in a format."""
    tensors = {name: x * 0.2 for name, x in random_tensors(LLAMA).items()}
    written = write_model(tensors, form)
    return save(path, LLAMA | {"quantization_config": form.config}, written.stored)


def load(path, numbers: Numbers = KEEP, laid: LaidOut | None = None):
    """Load a model on the devices of a layout; return its definition and its parameters."""
    with open_model(path) as files:
        rules = keep_published(numbers, files).weight_rules
        laid = replace(laid or LaidOut(files.spec.config), weight_rules=rules)
        spec = files.spec.arranged(laid.definition.arrangement)
        abstract = laid.definition.abstract_parameters(jnp.float32)
        shardings = laid.placement.parameters(laid.definition.logical_axes())
        quantisations = laid.definition.quantisations
        laid.parameters = load_params(spec, files.tensors, abstract, shardings, quantisations)
    return laid


def numbers_of(laid: LaidOut) -> dict[str, np.ndarray]:
    """Return the numbers of all parameters."""
    found = {}
    for name, array in laid.parameters.items():
        quantisation = laid.definition.quantisations.get(name)
        if quantisation is not None:
            scales, offsets = (laid.parameters.get(name + x) for x in (SCALES, OFFSETS))
            dtype = jnp.dtype("float32")
            weight = QuantisedWeight(array, scales, quantisation, offsets, dtype=dtype)
            array = weight.dequantise()
            if (order := laid.parameters.get(name + ORDER)) is not None:
                array = in_own_order(array, order, quantisation.inputs)
        if not name.endswith((SCALES, OFFSETS, ORDER)):
            found[name] = np.asarray(array)
    return found


def in_own_order(array, order, inputs) -> np.ndarray:
    """Return a weight of one layer with its inputs at their own positions."""
    first = array.ndim + inputs[0]
    flat = np.asarray(array).reshape(*array.shape[:first], order.size, -1)
    found = np.empty_like(flat)
    found[..., order, :] = flat
    return found.reshape(array.shape)


@FORMS
def test_a_plan_keeps_codes_and_scales_in_their_dtypes_and_their_numbers_are_exact(tmp_path, form):
    path = saved(tmp_path / "m", form)
    kept, plain = load(path), load(path, Numbers("float32"))
    for name in (f"layers.0.{weight}" for weight in WEIGHTS):
        found = kept.definition.quantisations[name].format
        assert (found.codes, found.group, found.scales, found.has_offsets) == (
            form.kept.codes,
            form.kept.group,
            form.kept.scales,
            form.kept.has_offsets,
        )
        assert kept.parameters[name].dtype == BYTE_DTYPES[form.kept.codes]
        assert kept.parameters[name + SCALES].dtype == form.kept.scales
        assert (name + OFFSETS in kept.parameters) == form.kept.has_offsets
        packed = AbstractModel(kept.config, AS_PUBLISHED, kept.weight_rules)
        assert packed.abstract_parameters("bfloat16")[name].dtype == form.kept.codes
    found = numbers_of(kept)
    for name, values in numbers_of(plain).items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@FORMS
def test_devices_hold_the_codes_of_one_device(tmp_path, form):
    path = saved(tmp_path / "m", form)
    with open_model(path) as files:
        devices = LaidOut(files.spec.config, layout_of(ON_DEVICES))
    heads = files.spec.config.attentions[0].num_kv_heads
    assert devices.definition.arrangement.kv_copies(heads) == 2
    kept, plain = (load(path, x, devices) for x in (KEEP, Numbers("float32")))
    found = numbers_of(kept)
    for name, values in numbers_of(plain).items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


@pytest.mark.parametrize("form", (*FORMATS, ACT_ORDER), ids=lambda form: form.name)
def test_a_model_answers_as_the_same_model_dequantised(tmp_path, form):
    path = saved(tmp_path / "m", form)
    answers = [
        forward(laid.config, laid.weight_rules)(laid.parameters)
        for laid in (load(path), load(path, Numbers("float32")))
    ]
    np.testing.assert_allclose(*answers, rtol=0, atol=FLOAT32_MODEL_LOGPROB)


@cache
def forward(config: DecoderConfig, rules: WeightRules, arrangement: Arrangement = AS_PUBLISHED):
    """Return a compiled function from parameters to log-probabilities of two prompts."""
    definition = AbstractModel(config, arrangement, rules)
    tokens_BT, length_B = np.arange(3, 19, dtype=np.int32).reshape(2, 8), np.array([8, 5])

    @jax.jit
    def logprobs(parameters):
        decoder = definition.bind(parameters)
        x_BTD, _ = decoder.forward(tokens_BT, length_B)
        return jax.nn.log_softmax(decoder.logits(x_BTD))

    return logprobs


def form_of(name: str) -> PublishedForm:
    (form,) = (form for form in FORMATS if form.name == name)
    return form


MIXTRAL = LLAMA | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}


def mixtral_tensors() -> dict[str, np.ndarray]:
    """Return random tensors of a model with experts in place of its MLP."""
    rng, tensors = np.random.default_rng(1), {}
    for name, array in random_tensors(LLAMA).items():
        if ".mlp." not in name:
            tensors[name] = array * 0.2
    prefix, shape = "model.layers.0.block_sparse_moe", (128, 128)
    tensors[f"{prefix}.gate.weight"] = rng.standard_normal((4, 128), np.float32)
    for expert, name in product(range(4), ("w1", "w2", "w3")):
        array = rng.standard_normal(shape, np.float32) * 0.2
        tensors[f"{prefix}.experts.{expert}.{name}.weight"] = array
    return tensors


@pytest.mark.parametrize(
    ("config", "layout", "form"),
    [
        (LLAMA, ON_DEVICES, form_of("AWQ")),
        (MIXTRAL, "expert-tensor@data=2,expert=2,tensor=2", form_of("AWQ")),
        pytest.param(LLAMA, ON_DEVICES, form_of("float8 by block"), marks=pytest.mark.slow),
    ],
    ids=["tensor", "expert", "tensor float8"],
)
def test_devices_answer_as_one_device_with_float_weights(tmp_path, config, layout, form):
    tensors = mixtral_tensors() if config is MIXTRAL else random_tensors(config)
    written = write_model({name: x * 0.5 for name, x in tensors.items()}, form)
    path = save(tmp_path / "m", config | {"quantization_config": form.config}, written.stored)
    one = load(path, Numbers("float32"))
    devices = load(path, KEEP, LaidOut(one.config, layout_of(layout)))
    assert devices.definition.quantisations
    rows = greedy_rows()
    rows_of_reference = tuple(rows.values())
    wanted = expected_of(AbstractModel(one.config), one.parameters, rows_of_reference, 0)
    state, _ = devices.prefill(rows)
    got = jax.nn.log_softmax(np.asarray(state.logits_BV)[list(rows), : one.config.vocab_size])
    np.testing.assert_allclose(got, wanted.prompt_logprobs_RV, rtol=0, atol=FLOAT32_MODEL_LOGPROB)


def test_act_order_is_kept_as_an_order_of_input_features(tmp_path):
    path = saved(tmp_path / "m", ACT_ORDER)
    kept, plain = load(path), load(path, Numbers("float32"))
    found = numbers_of(kept)
    for name, values in numbers_of(plain).items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
    orders = [np.asarray(kept.parameters[f"layers.0.{name}.order"]) for name in WEIGHTS]
    assert all(sorted(order) == list(range(128)) for order in orders)
    assert not np.array_equal(orders[0], np.arange(128))


def test_act_order_of_split_inputs_is_refused_by_name(tmp_path):
    with open_model(saved(tmp_path / "m", ACT_ORDER)) as files:
        rules, config = keep_published(KEEP, files).weight_rules, files.spec.config
    layout = layout_of("weight-stationary-1d@tensor=2")
    findings = check(layout, model_sizes(config, 2, weight_rules=rules))
    names = ("layers.0.mlp.down", "layers.0.attention.output")
    assert len(findings) == 2 and all(
        name in finding and "numbers.rules" in finding
        for name, finding in zip(names, sorted(findings), strict=True)
    )


def test_tensors_of_one_parameter_with_two_orders_are_refused_by_name(tmp_path):
    written = write_model(random_tensors(LLAMA), ACT_ORDER)
    name = "model.layers.0.self_attn.k_proj.g_idx"
    written.stored[name] = np.roll(written.stored[name], 1)
    config = LLAMA | {"quantization_config": ACT_ORDER.config}
    path = save(tmp_path / "m", config, written.stored)
    with pytest.raises(CheckpointMismatch, match=r"layers.0.attention.qkv: expected one order"):
        load(path)


def test_scanned_layers_keep_orders_of_their_own(tmp_path):
    config = LLAMA | {"num_hidden_layers": 2}
    stored = write_model(random_tensors(LLAMA), ACT_ORDER).stored
    for name, array in list(stored.items()):
        if ".layers.0." in name:
            array = np.roll(array, 1) if name.endswith("g_idx") else array
            stored[name.replace(".layers.0.", ".layers.1.")] = array
    path = save(tmp_path / "m", config | {"quantization_config": ACT_ORDER.config}, stored)
    with open_model(path) as files:
        scanned = LaidOut(files.spec.config, scan_layers=True)
    kept, unrolled = load(path, KEEP, scanned), load(path)
    orders = kept.parameters["layers.0:2.mlp.down.order"]
    assert orders.shape == (2, 128) and not np.array_equal(*orders)
    for i, order in enumerate(orders):
        np.testing.assert_array_equal(order, unrolled.parameters[f"layers.{i}.mlp.down.order"])
    scanning = replace(AS_PUBLISHED, scan_layers=True, packs_codes=False)
    found = forward(kept.config, kept.weight_rules, scanning)(kept.parameters)
    wanted = forward(kept.config, unrolled.weight_rules)(unrolled.parameters)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=FLOAT32_MODEL_LOGPROB)


def test_scanned_layers_keep_a_a_format_that_is_exact_for_all_of_them(tmp_path):
    """Two layers of int4 and uint4 have codes of int8 in a loop."""
    config = LLAMA | {"num_hidden_layers": 2}
    one, other = form_of("GPTQ without zero points"), form_of("GPTQ of 4 bits")
    tensors = random_tensors(LLAMA)
    stored = write_model(tensors, one).stored
    for name, array in write_model(tensors, one).stored.items():
        if ".layers.0." in name:
            stored[name.replace(".layers.0.", ".layers.1.")] = array
    path = save(tmp_path / "m", config | {"quantization_config": other.config}, stored)
    with open_model(path) as files:
        scanned = LaidOut(files.spec.config, scan_layers=True)
    kept, plain = load(path, KEEP, scanned), load(path, Numbers("float32"), scanned)
    found = numbers_of(kept)
    assert "layers.0:2.mlp.down" in kept.definition.quantisations
    for name, values in numbers_of(plain).items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


def test_a_group_on_two_devices_is_refused_by_name(tmp_path):
    path = saved(tmp_path / "m", form_of("float8 by block"))
    with open_model(path) as files:
        rules, config = keep_published(KEEP, files).weight_rules, files.spec.config
    layout = layout_of("weight-stationary-1d@tensor=8")
    findings = check(layout, model_sizes(config, 8, weight_rules=rules))
    assert any("number of groups of layers.0.mlp.down" in x and "is 4" in x for x in findings)


def test_a_checkpoint_without_codes_has_nothing_to_keep(tmp_path):
    path = save(tmp_path / "m", LLAMA, random_tensors(LLAMA))
    with open_model(path) as files, pytest.raises(ValueError, match="got m without any"):
        keep_published(KEEP, files)


def test_the_plan_of_another_checkpoint_is_refused(tmp_path):
    with open_model(saved(tmp_path / "one", form_of("AWQ"))) as files:
        numbers = keep_published(KEEP, files)
        assert keep_published(numbers, files) == numbers
    with (
        open_model(saved(tmp_path / "other", form_of("float8 by block"))) as files,
        pytest.raises(ValueError, match=r"numbers.published: expected the formats of other"),
    ):
        keep_published(numbers, files)


@pytest.mark.parametrize("weights", ["float", "int8"])
def test_an_override_of_the_weights_drops_the_formats_of_the_checkpoint(tmp_path, weights):
    with open_model(saved(tmp_path / "one", form_of("AWQ"))) as files:
        table = {"numbers": keep_published(KEEP, files).to_table()}
    overridden = override_plan(table, [f"numbers.weights={weights}"])["numbers"]
    assert Numbers.from_table(overridden) == Numbers("float32", weights)
    assert override_plan(table, ["numbers.cache=int8"])["numbers"]["published"]


def test_rules_of_the_plan_decide_before_what_is_published(tmp_path):
    rules = {"*.mlp.down": {"weights": "float"}, "*.output": {"weights": "int8"}}
    kept = load(saved(tmp_path / "m", form_of("AWQ")), replace(KEEP, rules=rules))
    formats = {name: str(x.format) for name, x in kept.definition.quantisations.items()}
    kept_as = "uint4 in groups of 16 with offsets, scales in float16"
    assert formats == {
        "layers.0.attention.qkv": kept_as,
        "layers.0.attention.output": "int8",
        "layers.0.mlp.gate_up": kept_as,
    }
    assert kept.parameters["layers.0.mlp.down"].dtype == "float32"


def test_experts_of_gpt_oss_keep_their_codes(tmp_path):
    rng, stored = np.random.default_rng(2), gpt_oss_tensors()
    for name, blocks in (("gate_up_proj", 2), ("down_proj", 1)):
        name = f"model.layers.0.mlp.experts.{name}"
        stored[f"{name}_blocks"] = rng.integers(0, 256, (3, 64, blocks, 16), np.uint8)
        stored[f"{name}_scales"] = rng.integers(120, 130, (3, 64, blocks), np.uint8)
    quantisation = {"quantization_config": {"quant_method": "mxfp4"}}
    path = save(tmp_path / "m", GPT_OSS | quantisation, stored)
    kept, plain = load(path), load(path, Numbers("float32"))
    form = "float4_e2m1fn in groups of 32, scales in float8_e8m0fnu"
    formats = {name: str(x.format) for name, x in kept.definition.quantisations.items()}
    assert formats == {"layers.0.mlp.gate_up": form, "layers.0.mlp.down": form}
    assert kept.parameters["layers.0.mlp.down"].dtype == "float8_e4m3fn"
    assert kept.parameters["layers.0.mlp.down.scales"].dtype == "float8_e8m0fnu"
    found = numbers_of(kept)
    for name, values in numbers_of(plain).items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)


BOXES = [
    ((-2,), (64, 40), (Interval(0, 4), Interval(8, 40))),
    ((-3, -2), (4, 16, 40), (Interval(1, 3), Interval(0, 40))),
    ((-2,), (3, 64, 40), (Interval(1, 3), Interval(0, 4), Interval(0, 40))),
]


@pytest.mark.parametrize(("inputs", "shape", "box"), BOXES)
def test_scales_are_read_in_pieces_of_the_weight(inputs, shape, box, monkeypatch):
    monkeypatch.setattr(published_weight, "_PIECE", 256)
    quantisation = Quantisation(WeightFormat("int4", 16, "float16"), inputs)
    scales = np.arange(np.prod(quantisation.scale_shape(shape)), dtype=np.float32)
    scales = scales.reshape(quantisation.scale_shape(shape))
    scales.flat[-1] = np.nan  # as a scale of MXFP4 may be
    numbers = scales.repeat(16, axis=len(scales.shape) + inputs[-1]).reshape(shape)
    sizes = []

    def read(part, box, dtype):
        sizes.append(np.prod([len(interval) for interval in box]))
        return numbers[tuple(interval.as_slice() for interval in box)].astype(dtype)

    weight = PublishedWeight("a", quantisation, shape, read)
    found = weight.read(SCALES, box, np.dtype(np.float32))
    np.testing.assert_array_equal(found, scales[tuple(i.as_slice() for i in box)])
    assert len(sizes) > 1 and max(sizes) <= 256


def test_an_order_is_read_in_pieces_of_the_weight(monkeypatch):
    monkeypatch.setattr(published_weight, "_PIECE", 256)
    quantisation = Quantisation(WeightFormat("int4", 16, "float16", is_ordered=True), (-2,))
    groups = np.random.default_rng(0).permutation(np.arange(64) // 16)
    sizes = []

    def read(part, box, dtype):
        sizes.append(len(box[1]))
        found = np.broadcast_to(groups[:, None], (64, len(box[1]))).astype(dtype)
        found[5] += np.arange(box[1].start, box[1].stop) >= last_equal
        return found

    weight, box = PublishedWeight("a", quantisation, (64, 40), read), (Interval(0, 64),)
    last_equal = 40
    found = weight.read(ORDER, box, np.dtype(np.int32))
    np.testing.assert_array_equal(found, np.argsort(groups, kind="stable"))
    assert sizes == [4] * 10
    last_equal = 38
    with pytest.raises(CheckpointMismatch, match="a: expected one order of inputs"):
        PublishedWeight("a", quantisation, (64, 40), read).read(ORDER, box, np.dtype(np.int32))
