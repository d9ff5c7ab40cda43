"""The methods of rounding against plain numpy, for weights of every shape."""

import numpy as np
import pytest
from quantised import dequantised, quantise

from noria.modelzoo.weights.weight_formats import Quantisation, WeightFormat
from noria.runtime.checkpoint.quantiser import dequantise, largest_code
from noria.runtime.quantisation.rounding import (
    CLIP,
    GPTQ,
    NEAREST,
    SHARES,
    gptq_codes,
    round_weight,
)

SHAPES = [((24, 10), (-2,)), ((2, 24, 10), (-2,)), ((2, 3, 4, 10), (-4, -3, -2)), ((7, 24), (-1,))]
FORMATS = [WeightFormat("int8"), WeightFormat("int4"), WeightFormat("int4", 4)]
A = 24
FLOAT32 = np.dtype(np.float32)


def random_weight(shape: tuple[int, ...]) -> np.ndarray:
    """Return a weight with a few large values."""
    return np.random.default_rng(0).standard_t(3, size=shape).astype(np.float32)


def as_matrix(array: np.ndarray, inputs: tuple[int, ...], ndim: int) -> np.ndarray:
    """Return `[input features, output features]` of a weight, or the groups of its scales."""
    start, stop = (ndim + inputs[i] for i in (0, -1))
    before, after = array.shape[:start], array.shape[array.ndim - (ndim - 1 - stop) :]
    joined = array.reshape(*before, -1, *after)
    return np.moveaxis(joined, len(before), 0).reshape(joined.shape[len(before)], -1)


@pytest.mark.parametrize("form", [*FORMATS, WeightFormat("float8_e4m3fn")], ids=str)
@pytest.mark.parametrize(("shape", "inputs"), SHAPES)
def test_nearest_is_the_rounding_of_weights_that_load_in_codes(shape, inputs, form):
    quantisation, weight = Quantisation(form, inputs), random_weight(shape)
    codes, scales = round_weight(weight, quantisation, FLOAT32, NEAREST)
    wanted = quantise(weight, quantisation)
    np.testing.assert_array_equal(codes, wanted[0])
    np.testing.assert_array_equal(scales, wanted[1])
    np.testing.assert_array_equal(
        dequantise(codes, scales, quantisation), dequantised(weight, quantisation)
    )


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(("shape", "inputs"), SHAPES)
def test_clip_takes_the_scale_with_the_least_squared_error(shape, inputs, form):
    quantisation, weight = Quantisation(form, inputs), random_weight(shape)
    codes, scales = round_weight(weight, quantisation, FLOAT32, CLIP)
    weight_AF, scales_GF = (as_matrix(x, inputs, weight.ndim) for x in (weight, scales))
    largest = largest_code(quantisation)
    for group_XF, scale_F in zip(np.split(weight_AF, len(scales_GF)), scales_GF, strict=True):
        for f, values in enumerate(group_XF.T):
            tried = [np.float32(abs(values).max() * np.float32(s)) / largest for s in SHARES]
            errors = [
                np.square(np.clip(np.rint(values / s), -largest, largest) * s - values).sum()
                for s in tried
            ]
            assert scale_F[f] in np.array(tried, np.float32)[errors <= min(errors) * (1 + 1e-5)]
    assert np.abs(codes).max() <= largest


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(("shape", "inputs"), SHAPES)
def test_gptq_rounds_the_matrix_of_input_and_output_features(shape, inputs, form):
    quantisation, weight = Quantisation(form, inputs), random_weight(shape)
    inputs_MA = np.random.default_rng(1).normal(size=(60, A))
    hessian_AA = (inputs_MA.T @ inputs_MA).astype(np.float32)
    codes, scales = round_weight(weight, quantisation, FLOAT32, GPTQ, hessian_AA)
    weight_AF, scales_GF, codes_AF = (
        as_matrix(x, inputs, weight.ndim) for x in (weight, scales, codes)
    )
    scales_AF = np.repeat(scales_GF, A // len(scales_GF), axis=0)
    wanted = gptq_codes(weight_AF, hessian_AA, scales_AF, largest_code(quantisation))
    np.testing.assert_array_equal(codes_AF, wanted)
    assert codes.shape == weight.shape


def test_gptq_without_a_hessian_is_clip():
    quantisation, weight = Quantisation(FORMATS[2], (-2,)), random_weight((24, 10))
    for got, wanted in zip(
        round_weight(weight, quantisation, FLOAT32, GPTQ),
        round_weight(weight, quantisation, FLOAT32, CLIP),
        strict=True,
    ):
        np.testing.assert_array_equal(got, wanted)
