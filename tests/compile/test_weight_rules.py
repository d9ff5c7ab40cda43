"""Rules that choose the format of each weight, and what they refuse."""

from dataclasses import replace

import pytest
from alike import alike, changed
from decode_steps import step_of
from tiny import CONFIG

from noria.compile.abstract_model import AbstractModel
from noria.compile.planning.work import Work
from noria.compile.weight_rules import WeightRules
from noria.modelzoo.config import AS_PUBLISHED
from noria.modelzoo.weights.weight_formats import SCALES, WeightFormat, common_format

INT8, INT4 = WeightFormat("int8"), WeightFormat("int4", 8)
SCANNED = replace(AS_PUBLISHED, scan_layers=True)
ALIKE = changed(CONFIG, windows=(None,) * 3)
"""A model whose layers run in one loop."""


def formats(rules: WeightRules, arrangement=AS_PUBLISHED) -> dict[str, WeightFormat]:
    found = AbstractModel(ALIKE, arrangement, rules).quantisations
    return {name: quantisation.format for name, quantisation in found.items()}


def test_products_of_layers_are_quantised_and_the_head_norms_and_biases_are_not():
    weights = ("attention.qkv", "attention.output", "mlp.gate_up", "mlp.down")
    layers = range(CONFIG.num_layers)
    expected = {f"layers.{i}.{weight}": INT8 for i in layers for weight in weights}
    assert formats(WeightRules(INT8)) == expected
    assert not formats(WeightRules())


def test_the_last_rule_that_matches_decides():
    rules = (("layers.1.*.qkv", None), ("*.mlp.*", INT4), ("layers.0.mlp.down", None))
    found = formats(WeightRules(INT8, (*rules, ("embedding.table", INT8))))
    assert found["layers.0.attention.qkv"] == INT8 and found["layers.0.mlp.gate_up"] == INT4
    assert found["embedding.table"] == INT8
    assert not {"layers.1.attention.qkv", "layers.0.mlp.down"} & set(found)


@pytest.mark.parametrize(
    ("rules", "arrangement", "message"),
    [
        ((("layers.*.mlp.dwon", None),), AS_PUBLISHED, "'layers.*.mlp.dwon': .* matches no param"),
        ((("layers.0.*", INT8),), AS_PUBLISHED, "weights of products, got layers.0.attention_norm"),
        ((("layers.0.mlp.down", None),), SCANNED, "layers.0:3.mlp.down, got float and int8"),
        ((("*.down", WeightFormat("int4", 16)),), AS_PUBLISHED, "divisor of the 40 .*, got 16"),
    ],
)
def test_a_rule_that_cannot_be_followed_is_refused_by_name(rules, arrangement, message):
    with pytest.raises(ValueError, match=f"numbers.*{message}"):
        formats(WeightRules(INT8, rules), arrangement)


@pytest.mark.parametrize(
    "form",
    [
        INT4,
        WeightFormat("int8", 8),
        WeightFormat("int8", 0, "bfloat16", has_offsets=True),
        WeightFormat("float8_e4m3fn", 0, "float32"),
    ],
    ids=str,
)
def test_int8_activations_need_products_of_integers(form):
    published = (("layers.*.attention.*", INT8), ("layers.*.mlp.down", form))
    kept = WeightRules(None, (), published, rounds_activations=True)
    with pytest.raises(ValueError, match=r"for layers\.0\.mlp\.down, got .*activations = 'float'"):
        formats(kept)
    rules = (("*.mlp.down", None),)
    found = formats(replace(kept, rules=rules))
    assert set(found.values()) == {INT8} and "layers.0.mlp.down" not in found
    quantised = WeightRules(INT8, (("*.mlp.down", form),), rounds_activations=True)
    with pytest.raises(ValueError, match="without groups and offsets, or float"):
        formats(quantised)


def test_scales_are_parameters_of_their_own():
    model = AbstractModel(ALIKE, SCANNED, WeightRules(INT4))
    abstract, axes = model.abstract_parameters("bfloat16"), model.logical_axes()
    down = "layers.0:3.mlp.down"
    assert (abstract[down].shape, abstract[down].dtype) == ((3, 40, 24), "int4")
    assert (abstract[down + SCALES].shape, axes[down + SCALES]) == ((3, 5, 24), axes[down])
    whole = AbstractModel(ALIKE, SCANNED, WeightRules(INT8))
    assert whole.abstract_parameters("bfloat16")[down + SCALES].shape == (3, 1, 24)
    assert whole.logical_axes()[down + SCALES] == ("", "", "embed_in")


@pytest.mark.parametrize(
    ("form", "bits"),
    [(None, 16), (INT8, 8 + 16 / 24), (INT4, 4 + 16 / 8), (WeightFormat("int8", 8), 8 + 2)],
    ids=str,
)
def test_the_bytes_that_decode_needs_are_those_of_codes_and_scales(form, bits):
    """Without groups, the scales are counted in the average of each weight."""
    narrow, wide = (
        Work(AbstractModel(CONFIG, weight_rules=WeightRules(x)), "bfloat16") for x in (form, None)
    )
    call = step_of(4, 32)
    D, F, heads = (
        CONFIG.embed,
        alike(CONFIG).mlp,
        alike(CONFIG).num_query_heads * alike(CONFIG).head_dim,
    )
    qkv = D * (heads + 2 * alike(CONFIG).num_kv_heads * alike(CONFIG).head_dim)
    elements = CONFIG.num_layers * (qkv + heads * D + 3 * D * F)
    saved = wide.needed(call).weights - narrow.needed(call).weights
    assert saved == pytest.approx(elements * (16 - bits) / 8, rel=0.02)
    parameters = wide.parameter_bytes - narrow.parameter_bytes
    assert parameters == pytest.approx(saved)


@pytest.mark.parametrize(
    ("formats", "common"),
    [
        (("int4", "int4"), "int4"),
        (("int4", "uint4"), "int8"),
        (("uint4", "int8"), "int8"),
        (("float4_e2m1fn", "float8_e4m3fn"), "float8_e4m3fn"),
        (("int4", "float8_e4m3fn"), None),
    ],
)
def test_a_common_format_has_codes_for_the_values_of_both(formats, common):
    one, other = (WeightFormat(codes, 32, "float16") for codes in formats)
    found = common_format([one, other])
    assert found == (common and WeightFormat(common, 32, "float16"))
    assert common_format([one, None]) is None


def test_a_common_format_has_the_groups_scales_and_offsets_of_both():
    one = WeightFormat("int8", 48, "float16")
    found = common_format([one, WeightFormat("int8", 32, "float32", has_offsets=True)])
    assert found == WeightFormat("int8", 16, "float32", has_offsets=True)
    assert common_format([one, WeightFormat("int8", 0, "float16")]) == one
    assert common_format([one, WeightFormat("int8", 5, "float16")]) is None
    assert common_format([one, replace(one, is_ordered=True)]) is None


def test_layers_of_a_loop_with_several_published_formats_have_a_common_one():
    one, other = WeightFormat("int4", 8, "float16"), WeightFormat("uint4", 4, "float16")
    published = ("layers.0.mlp.down", one), ("layers.[12].mlp.down", other)
    found = formats(WeightRules(published=published), SCANNED)
    assert found == {"layers.0:3.mlp.down": WeightFormat("int8", 4, "float16")}
    rules = WeightRules(rules=(("layers.0.mlp.down", None),), published=published)
    with pytest.raises(ValueError, match=r"expected one format for layers.0:3.mlp.down"):
        formats(rules, SCANNED)
