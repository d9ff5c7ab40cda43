"""The loader rounds weights as the plain quantiser does, whatever the sharding."""

import jax.numpy as jnp
import numpy as np
import pytest
from quantised import quantise

from noria.modelzoo.weights.weight_formats import BYTE_DTYPES, Quantisation, WeightFormat
from noria.runtime.checkpoint import quantiser
from noria.runtime.checkpoint.tensor_source import intervals

RNG = np.random.default_rng(0)
SHAPES = [((24, 10), (-2,)), ((2, 24, 10), (-2,)), ((2, 3, 4, 10), (-4, -3, -2)), ((7, 24), (-1,))]
FLOAT8 = WeightFormat("float8_e4m3fn")
FORMATS = [WeightFormat("int8"), FLOAT8, WeightFormat("int4"), WeightFormat("int4", 4)]


@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize(("shape", "inputs"), SHAPES)
@pytest.mark.parametrize("piece", [2**20, 25])
def test_codes_and_scales_are_those_of_the_plain_quantiser(shape, inputs, form, piece, monkeypatch):
    monkeypatch.setattr(quantiser, "_PIECE", piece)
    quantisation = Quantisation(form, inputs)
    weight = RNG.normal(size=shape).astype(np.float32)
    weight[..., :1] = 0
    whole = quantiser.WeightQuantiser(quantisation, shape, np.dtype(np.float32))
    box = intervals((slice(None),) * len(shape), shape)
    codes, scales = quantise(weight, quantisation)
    np.testing.assert_array_equal(
        whole.codes(box, weight, np.dtype(BYTE_DTYPES[form.codes])), codes
    )
    np.testing.assert_array_equal(whole.scales, scales)


@pytest.mark.parametrize("form", FORMATS, ids=str)
def test_boxes_along_the_inputs_share_the_scales_of_the_whole_weight(form):
    quantisation, shape = Quantisation(form, (-2,)), (24, 10)
    weight = RNG.normal(size=shape).astype(np.float32)
    split = quantiser.WeightQuantiser(quantisation, shape, np.dtype(np.float32))
    indices = [(slice(start, start + 8), slice(None)) for start in (0, 8, 16)]
    boxes = [(intervals(index, shape), weight[index]) for index in indices]
    if any(split.shares_groups(box) for box, _ in boxes):
        split.measure(iter(boxes))
    in_bytes = np.dtype(BYTE_DTYPES[form.codes])
    codes = [split.codes(box, part, in_bytes) for box, part in boxes]
    wanted, scales = quantise(weight, quantisation)
    np.testing.assert_array_equal(np.concatenate(codes), wanted)
    np.testing.assert_array_equal(split.scales, scales)


def test_scales_are_rounded_before_codes():
    """A code is the value over the scale that is stored, so bfloat16 scales add little error."""
    quantisation = Quantisation(WeightFormat("int8"), (-2,))
    weight = RNG.normal(size=(256, 8)).astype(np.float32)
    whole = quantiser.WeightQuantiser(quantisation, weight.shape, jnp.dtype(jnp.bfloat16))
    box = intervals((slice(None),) * 2, weight.shape)
    codes = whole.codes(box, weight, np.dtype(np.int8)).astype(np.float32)
    scales = whole.scales.astype(np.float32)
    inside = np.abs(codes) < quantiser.largest_code(quantisation)
    assert (np.abs(codes * scales - weight) <= scales * 0.5001)[inside].all()


def test_float8_codes_are_the_nearest_ones():
    """The error is at most half a step: a sixteenth of the value, or of the smallest normal one."""
    quantisation = Quantisation(FLOAT8, (-2,))
    weight = RNG.standard_t(3, size=(256, 8)).astype(np.float32)
    whole = quantiser.WeightQuantiser(quantisation, weight.shape, np.dtype(np.float32))
    box = intervals((slice(None),) * 2, weight.shape)
    codes = whole.codes(box, weight, np.dtype(FLOAT8.codes)).astype(np.float32)
    assert np.abs(codes).max(axis=0).tolist() == [448.0] * 8
    scaled = weight / whole.scales
    assert (np.abs(codes - scaled) <= np.maximum(np.abs(scaled), 2.0**-6) / 16 * 1.0001).all()
