"""Products of quantised weights equal products of the values of their codes and scales."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alike import changed
from covering import covering
from quantised import dequantised, quantise
from tiny import TWO_LAYERS
from tolerances import FLOAT32_ELEMENTWISE

from noria.compile.abstract_model import AbstractModel
from noria.compile.weight_rules import WeightRules
from noria.modelzoo.config import Arrangement
from noria.modelzoo.operations import Operations
from noria.modelzoo.weights.product import Labels, Product, einsum, gate_up_product
from noria.modelzoo.weights.quantised_weight import (
    QuantisedWeight,
    as_slices,
    multiply_by_group,
    multiply_on_gpu,
    multiply_without_offsets,
    slice_weight,
    take_rows,
)
from noria.modelzoo.weights.weight_formats import Quantisation, WeightFormat
from noria.modelzoo.weights.weight_products import multiply

RNG = np.random.default_rng(0)
FORMATS = [
    WeightFormat("int8"),
    WeightFormat("float8_e4m3fn"),
    WeightFormat("int8", 4),
    WeightFormat("int4", 8),
]
PUBLISHED = [
    WeightFormat("int8", 0, "bfloat16", has_offsets=True),
    WeightFormat("uint4", 8, "float16", has_offsets=True),
    WeightFormat("float8_e4m3fn", 4, "float32"),
    WeightFormat("float4_e2m1fn", 4, "float8_e8m0fnu"),
]
IN_GROUPS = [x for x in (*FORMATS, *PUBLISHED) if x.group or x.has_offsets]
PRODUCTS = [
    (*einsum("BTF,FD->BTD"), (3, 5, 16), (16, 24), (-2,)),
    (*einsum("BTD,DKJH->BTKJH"), (3, 1, 16), (16, 2, 4, 8), (-4,)),
    (*einsum("BTKGH,KGHD->BTD"), (3, 2, 2, 3, 8), (2, 3, 8, 12), (-4, -3, -2)),
    ("BTD,PDF->PBTF", gate_up_product, (3, 5, 16), (2, 16, 24), (-2,)),
    ("BD,VD->BV", einsum("...D,VD->...V")[1], (3, 5, 16), (31, 16), (-1,)),
    (*einsum("BTI,NHI->BTNH"), (3, 5, 16), (4, 6, 16), (-1,)),
    (*einsum("BTNH,NHI->BTNI"), (3, 5, 4, 6), (4, 6, 16), (-1,)),
    (*einsum("BTD,D->BT"), (3, 5, 16), (16,), (-1,)),
]
"""Equation, product, shape of the activations and of the weight, and inputs."""


def name_of(value: object) -> str:
    return value[0] if isinstance(value, tuple) else str(value)


def weight_of(shape: tuple[int, ...], inputs: tuple[int, ...], form: WeightFormat):
    """Return a random quantised weight, and its values."""
    quantisation = Quantisation(form, inputs)
    weight = RNG.normal(size=shape).astype(np.float32)
    if form.is_published:
        return published_weight(weight, quantisation)
    codes, scales = map(jnp.asarray, quantise(weight, quantisation))
    assert scales.shape == quantisation.scale_shape(shape)
    return QuantisedWeight(codes, scales, quantisation), dequantised(weight, quantisation)


def published_weight(weight: np.ndarray, quantisation: Quantisation):
    """Return a weight whose codes have other dtypes, with scales and offsets of its groups."""
    form, shape = quantisation.format, quantisation.scale_shape(weight.shape)
    codes = np.rint(weight * 3).clip(0 if form.codes.startswith("u") else -6, 6)
    codes, scales = codes.astype(form.codes), RNG.uniform(0.1, 1, shape).astype(form.scales)
    offsets = RNG.normal(size=shape).astype(np.float32) if form.has_offsets else None
    axis = len(shape) + quantisation.inputs[-1]
    before, members = shape[:axis], quantisation.num_inputs(weight.shape) // shape[axis]
    grouped = codes.astype(np.float32).reshape(*before, shape[axis], members, *shape[axis + 1 :])
    values = grouped * np.expand_dims(scales.astype(np.float32), axis + 1)
    if offsets is not None:
        values = values + np.expand_dims(offsets, axis + 1)
    arrays = jnp.asarray(codes), jnp.asarray(scales), quantisation
    given = None if offsets is None else jnp.asarray(offsets)
    weight = QuantisedWeight(*arrays, given, dtype=jnp.dtype("float32"))
    return weight, values.reshape(weight.shape)


@pytest.mark.parametrize(("case", "form"), covering(PRODUCTS, [*FORMATS, *PUBLISHED]), ids=name_of)
def test_a_product_with_codes_is_that_with_their_values(case, form):
    equation, multiplied, x_shape, shape, inputs = case
    x = jnp.asarray(RNG.normal(size=x_shape).astype(np.float32))
    weight, values = weight_of(shape, inputs, form)
    got = jax.jit(partial(multiply, Product(equation, multiplied)))(x, weight)
    wanted = multiplied(x, jnp.asarray(values))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=FLOAT32_ELEMENTWISE * 4)


def by_group(labels: Labels, product, x: jax.Array, weight: QuantisedWeight):
    """Return the product as a TPU computes it for few rows."""
    del product
    return multiply_by_group(labels, x, weight)


def on_gpu(labels: Labels, product, x: jax.Array, weight: QuantisedWeight):
    """Return the product as a GPU computes it for few rows, but here in true float32."""
    return multiply_on_gpu(labels, product, x, weight)


@pytest.mark.parametrize("multiplied", [by_group, on_gpu, multiply_without_offsets])
@pytest.mark.parametrize(("case", "form"), covering(PRODUCTS[:4], IN_GROUPS), ids=name_of)
def test_the_product_of_few_rows_is_that_with_the_values(case, form, multiplied):
    equation, product, x_shape, shape, inputs = case
    x = jnp.asarray(RNG.normal(size=x_shape).astype(np.float32))
    weight, values = weight_of(shape, inputs, form)
    got = jax.jit(partial(multiplied, Labels.of(equation), product))(x, weight)
    wanted = product(x, jnp.asarray(values))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=FLOAT32_ELEMENTWISE * 4)


def has_form(x: jax.Array, weight: QuantisedWeight) -> dict[str, bool]:
    """Return whether the program of a product has the platform's form for few rows.

    On a TPU, groups are a batch axis of the product; on a GPU, the product rounds to bfloat16.
    """
    multiplied = jax.jit(lambda x, weight: multiply(einsum("BF,FD->BD"), x, weight))
    traced, marks = multiplied.trace(x, weight), ("batching_dims", "lhs_precision_type = bf16")
    return {
        platform: any(
            mark in traced.lower(lowering_platforms=(platform,)).as_text() for mark in marks
        )
        for platform in ("tpu", "cpu", "cuda")
    }


@pytest.mark.parametrize(
    ("rows", "is_slice", "on_tpu", "on_gpu"),
    [
        (8, False, True, True),
        (9, False, False, True),
        (512, False, False, True),
        (513, False, False, False),
        (8, True, False, True),
    ],
)
def test_few_rows_have_a_form_of_their_own_on_tpu_and_gpu(rows, is_slice, on_tpu, on_gpu):
    """Groups have eight members. A slice of a stack has no such form on TPU."""
    weight, _ = weight_of((16, 24), (-2,), WeightFormat("int4", 8))
    weight = as_slices([weight])[0] if is_slice else weight
    in_bfloat16 = replace(weight, scales=weight.scales.astype(jnp.bfloat16))
    found = has_form(jnp.zeros((rows, 16), jnp.bfloat16), in_bfloat16)
    assert found == {"tpu": on_tpu, "cpu": False, "cuda": on_gpu}
    found = has_form(jnp.zeros((rows, 16)), weight)
    assert found == {"tpu": on_tpu, "cpu": False, "cuda": False}, "a product in float32 stays so"


@pytest.mark.parametrize(("rows", "on_tpu"), [(8, 2), (9, 1)])
def test_offsets_of_a_slice_have_a_product_of_their_own_for_few_rows_on_tpu(rows, on_tpu):
    weight, _ = weight_of((16, 24), (-2,), WeightFormat("uint4", 8, "float16", has_offsets=True))
    multiplied = jax.jit(lambda x, weight: multiply(einsum("BF,FD->BD"), x, weight))
    traced = multiplied.trace(jnp.zeros((rows, 16)), *as_slices([weight]))
    for platform, products in (("tpu", on_tpu), ("cpu", 1)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("stablehlo.dot_general") == products


class WeightsSeen(Operations):
    """The operations of one device, which record the weights of products."""

    def __init__(self):
        self.weights = []

    def project(self, product, x, weight, *axes, **options) -> jax.Array:
        self.weights.append(weight[...])
        return super().project(product, x, weight, *axes, **options)


@pytest.mark.parametrize("scan_layers", [False, True])
def test_the_weights_of_scanned_layers_are_slices(scan_layers):
    rules, arrangement = WeightRules(WeightFormat("int4", 8)), Arrangement(scan_layers=scan_layers)
    config, operations = changed(TWO_LAYERS, windows=(None, None)), WeightsSeen()
    model = AbstractModel(config, arrangement, rules)

    def forward(parameters: dict[str, jax.Array]) -> jax.Array:
        decoder = model.bind(parameters, operations)
        return decoder.forward(jnp.zeros((1, 4), jnp.int32), jnp.array([4]))[0]

    jax.eval_shape(forward, model.abstract_parameters("float32"))
    in_codes = [weight for weight in operations.weights if isinstance(weight, QuantisedWeight)]
    assert [weight.is_slice for weight in in_codes] == [scan_layers] * (4 if scan_layers else 8)


def rounded(x: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Return the values of activations in int8, with one scale for all features along `axes`."""
    scale = np.abs(x).max(axes, keepdims=True) * np.float32(1 / 127)
    return np.rint(x / np.where(scale == 0, 1, scale)) * scale


@pytest.mark.parametrize("case", PRODUCTS, ids=lambda case: case[0])
def test_activations_are_rounded_with_a_scale_for_the_features_of_a_token(case):
    """One token is zeros. The product itself gets and returns integers."""
    equation, product, x_shape, shape, inputs = case
    x = RNG.normal(size=x_shape).astype(np.float32)
    x[0, 0] = 0
    weight, values = weight_of(shape, inputs, WeightFormat("int8"))
    weight = replace(weight, quantisation=replace(weight.quantisation, rounds_activations=True))
    x_labels, _, out_labels = Labels.of(equation)
    # an equation may leave out leading axes
    offset = x.ndim - len(x_labels)
    summed = tuple(i + offset for i, label in enumerate(x_labels) if label not in out_labels)
    # the absorbed product of latents sums over features that have scales of their own
    is_absorbed = equation == "BTNH,NHI->BTNI"
    scales = np.asarray(weight.scales)[None, None, ..., 0] if is_absorbed else np.float32(1)
    wanted = product(jnp.asarray(rounded(x * scales, summed) / scales), jnp.asarray(values))

    def checked(x: jax.Array, codes: jax.Array) -> jax.Array:
        out = product(x, codes)
        assert (x.dtype, codes.dtype, out.dtype) == (jnp.int8, jnp.int8, jnp.int32)
        return out

    got = jax.jit(partial(multiply, Product(equation, checked)))(jnp.asarray(x), weight)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=FLOAT32_ELEMENTWISE * 4)


def test_a_token_that_is_not_finite_has_no_finite_result():
    weight, _ = weight_of((16, 24), (-2,), WeightFormat("int8"))
    weight = replace(weight, quantisation=replace(weight.quantisation, rounds_activations=True))
    x = jnp.ones((3, 16)).at[0, 1].set(jnp.nan).at[1, 2].set(jnp.inf)
    out = multiply(einsum("BF,FD->BD"), x, weight)
    np.testing.assert_array_equal(jnp.isfinite(out).all(axis=1), [False, False, True])


@pytest.mark.parametrize("form", [*FORMATS, *PUBLISHED], ids=str)
def test_the_values_of_codes_are_exact(form):
    weight, values = weight_of((2, 3, 8, 12), (-4, -3, -2), form)
    np.testing.assert_array_equal(weight.dequantise(), values)
    table, values = weight_of((31, 16), (-1,), form)
    np.testing.assert_array_equal(
        take_rows(table, jnp.array([[4, 0], [30, 99]])), values[[[4, 0], [30, 30]]]
    )


@pytest.mark.parametrize("form", [*FORMATS, *PUBLISHED], ids=str)
def test_a_slice_has_its_own_scales(form):
    weight, values = weight_of((3, 16, 12), (-2,), form)
    got = slice_weight(weight, [jnp.int32(1), jnp.int32(8), 0], [1, 8, 12])
    np.testing.assert_array_equal(got.dequantise(), values[1:2, 8:])
    np.testing.assert_array_equal(weight[2].dequantise(), values[2])


@pytest.mark.usefixtures("optimized")
def test_products_of_bfloat16_are_rounded_once():
    """Scales multiply the float32 sums, so the result is the nearest bfloat16 of the exact one."""
    weight, values = weight_of((16, 24), (-2,), WeightFormat("int8"))
    x = jnp.asarray(RNG.normal(size=(3, 16)), jnp.bfloat16)
    got = multiply(einsum("BF,FD->BD"), x, weight)
    exact = np.asarray(x, np.float64) @ values.astype(np.float64)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, jnp.asarray(exact.astype(np.float32)).astype(jnp.bfloat16))


def test_weights_are_pytrees_of_codes_and_scales():
    weight, _ = weight_of((16, 24), (-2,), WeightFormat("int8"))
    assert [leaf.shape for leaf in jax.tree.leaves(weight)] == [(16, 24), (1, 24)]


def test_an_order_is_that_of_the_input_features_of_the_codes():
    weight, values = weight_of((2, 4, 8, 12), (-4, -3, -2), WeightFormat("int8", 4))
    order = RNG.permutation(64)
    unordered = np.empty((64, 12), np.float32)
    unordered[order] = values.reshape(64, 12)
    x = jnp.asarray(RNG.normal(size=(3, 2, 4, 8)).astype(np.float32))
    multiplied = einsum("BKGH,KGHD->BD")
    got = multiply(multiplied, x, replace(weight, order=jnp.asarray(order)))
    wanted = multiplied(x, jnp.asarray(unordered.reshape(2, 4, 8, 12)))
    np.testing.assert_allclose(got, wanted, rtol=0, atol=FLOAT32_ELEMENTWISE * 4)
