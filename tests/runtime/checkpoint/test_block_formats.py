"""Quantised blocks against literal readings of their specifications, and against transformers."""

import math

import ml_dtypes
import numpy as np
import pytest

from noria.modelzoo.families.quantisation import BlockFloat8, Mxfp4
from noria.runtime.checkpoint.formats.block_formats import format_of
from noria.runtime.checkpoint.tensor_source import TensorInfo, intervals

ROWS, COLUMNS = 5, 3
FLOAT8 = format_of(BlockFloat8(ROWS, COLUMNS))
MXFP4 = format_of(Mxfp4())
FLOAT8_CODES = ml_dtypes.float8_e4m3fn


def float_of(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    """Return the value of a small float without infinities, from sign, exponent and mantissa."""
    mantissa = code & (2**mantissa_bits - 1)
    exponent = code >> mantissa_bits & (2**exponent_bits - 1)
    sign = -1.0 if code >> (mantissa_bits + exponent_bits) else 1.0
    bias = 2 ** (exponent_bits - 1) - 1
    if exponent == 0:
        return sign * mantissa / 2**mantissa_bits * 2.0 ** (1 - bias)
    return sign * (1 + mantissa / 2**mantissa_bits) * 2.0 ** (exponent - bias)


def e4m3(code: int) -> float:
    return math.nan if code & 0x7F == 0x7F else float_of(code, 4, 3)


def e2m1(code: int) -> float:
    return float_of(code, 2, 1)


def e8m0(code: int) -> float:
    return math.nan if code == 255 else 2.0 ** (code - 127)


def float8_reference(codes, scales):
    values = np.empty(codes.shape, np.float32)
    for (row, column), code in np.ndenumerate(codes.view(np.uint8)):
        scale = np.float32(scales[row // ROWS, column // COLUMNS])
        values[row, column] = np.float32(e4m3(int(code))) * scale
    return values


def mxfp4_reference(codes, scales):
    num_experts, num_outputs, num_blocks, _ = codes.shape
    values = np.empty((num_experts, num_blocks * 32, num_outputs), np.float32)
    for (expert, output, block, byte), two in np.ndenumerate(codes):
        scale = e8m0(int(scales[expert, output, block]))
        first = block * 32 + 2 * byte
        values[expert, first, output] = e2m1(int(two) % 16) * scale
        values[expert, first + 1, output] = e2m1(int(two) // 16) * scale
    return values


def random_float8(shape, scale_dtype=np.float32):
    """Return every code except NaN's, and scales of many sizes."""
    rng = np.random.default_rng(sum(shape))
    codes = rng.integers(0, 127, shape, np.uint8) | rng.integers(0, 2, shape, np.uint8) << 7
    scales = rng.lognormal(sigma=4, size=scales_shape(FLOAT8, shape)).astype(scale_dtype)
    return codes.view(ml_dtypes.float8_e4m3fn), scales


def random_mxfp4(scales_below=254):
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 256, (2, 7, 3, 16), np.uint8)
    return codes, rng.integers(0, scales_below, (2, 7, 3), np.uint8)


def read(form, codes, scales, index=None):
    """Read a box of the numbers, from only the codes and scales that the format requests."""
    tensor = bound(form, codes.shape)
    box = intervals(index or (slice(None),) * len(tensor.shape), tensor.shape)
    if not all(map(len, box)):
        return np.empty([len(interval) for interval in box], np.float32)
    arrays = {"codes": codes, "scales": scales}
    return tensor.read(lambda role, index: arrays[role][index], box, "values")


def boxes_to_read(form, codes_shape, index):
    """Return the boxes of codes and scales that a box of the numbers needs."""
    tensor, boxes = bound(form, codes_shape), {}
    shapes = {"codes": codes_shape, "scales": scales_shape(form, codes_shape)}

    def fetch(role, index):
        boxes[role] = index
        dtype = np.uint8 if form is MXFP4 else np.float32 if role == "scales" else FLOAT8_CODES
        return np.zeros(shapes[role], dtype)[index]

    tensor.read(fetch, intervals(index, tensor.shape), "values")
    return boxes["codes"], boxes["scales"]


def bound(form, codes_shape):
    """Return a tensor with codes of a shape."""
    shapes = {"codes": codes_shape, "scales": scales_shape(form, codes_shape)}
    infos = {role: TensorInfo(shape, np.dtype(np.uint8), "", 0) for role, shape in shapes.items()}
    return form.bind(infos)


def scales_shape(form, codes_shape):
    if form is MXFP4:
        return codes_shape[:-1]
    return (-(-codes_shape[0] // ROWS), -(-codes_shape[1] // COLUMNS))


def random_indices(shape, count=200):
    rng = np.random.default_rng(1)
    for _ in range(count):
        ends = [sorted(rng.integers(0, size + 1, 2)) for size in shape]
        yield tuple(slice(int(a), int(b)) for a, b in ends)


@pytest.mark.parametrize("shape", [(10, 9), (11, 10), (4, 2), (16, 1)])
@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16])
def test_float8_is_the_value_of_each_code_times_the_scale_of_its_block(shape, scale_dtype):
    codes, scales = random_float8(shape, scale_dtype)
    got = read(FLOAT8, codes, scales)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, float8_reference(codes, scales))


def test_every_float8_code_has_the_value_of_its_bits():
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16).view(ml_dtypes.float8_e4m3fn)
    scales = np.ones(scales_shape(FLOAT8, (16, 16)), np.float32)
    got = read(FLOAT8, codes, scales)
    np.testing.assert_array_equal(got, float8_reference(codes, scales))
    assert np.isnan(got).sum() == 2 and np.nanmax(got) == 448


def test_any_box_of_float8_is_that_of_the_whole():
    codes, scales = random_float8((17, 10))
    whole = float8_reference(codes, scales)
    for index in random_indices(whole.shape):
        np.testing.assert_array_equal(read(FLOAT8, codes, scales, index), whole[index])


def test_float8_equals_what_transformers_makes_of_it():
    integration = pytest.importorskip("transformers.integrations.finegrained_fp8")
    import torch

    codes, scales = random_float8((17, 10))
    expected = integration._dequantize_fp8_weight(
        torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn),
        torch.from_numpy(scales),
        [ROWS, COLUMNS],
        torch.float32,
    )
    np.testing.assert_array_equal(read(FLOAT8, codes, scales), expected.numpy())


def test_mxfp4_is_two_codes_a_byte_times_the_power_of_two_of_their_block():
    codes, scales = random_mxfp4()
    got = read(MXFP4, codes, scales)
    assert got.dtype == np.float32 and got.shape == (2, 3 * 32, 7)
    np.testing.assert_array_equal(got, mxfp4_reference(codes, scales))


def test_every_mxfp4_code_and_scale_has_the_value_of_its_bits():
    codes = np.arange(256, dtype=np.uint8).reshape(1, 1, 16, 16)
    codes = np.repeat(codes, 16, axis=1)
    scales = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    with np.errstate(over="ignore"):  # 6 * 2**127 is infinite in float32
        expected = mxfp4_reference(codes, scales)
        got = read(MXFP4, codes, scales)
    np.testing.assert_array_equal(got, expected)
    assert np.isnan(got).sum() == 32  # the block whose scale is 255


def test_any_box_of_mxfp4_is_that_of_the_whole():
    codes, scales = random_mxfp4()
    whole = mxfp4_reference(codes, scales)
    for index in random_indices(whole.shape):
        np.testing.assert_array_equal(read(MXFP4, codes, scales, index), whole[index])


def test_mxfp4_equals_what_transformers_makes_of_it():
    integration = pytest.importorskip("transformers.integrations.mxfp4")
    import torch

    codes, scales = random_mxfp4()
    expected = integration.convert_moe_packed_tensors(
        torch.from_numpy(codes), torch.from_numpy(scales), dtype=torch.float32
    )
    np.testing.assert_array_equal(read(MXFP4, codes, scales), expected.numpy())


@pytest.mark.parametrize(
    ("index", "codes_box", "scales_box"),
    [
        ((slice(3, 7), slice(0, 3)), (slice(3, 7), slice(0, 3)), (slice(0, 2), slice(0, 1))),
        ((slice(5, 10), slice(4, 9)), (slice(5, 10), slice(4, 9)), (slice(1, 2), slice(1, 3))),
    ],
)
def test_a_box_of_float8_needs_its_own_codes_and_the_scales_of_the_blocks_it_touches(
    index, codes_box, scales_box
):
    assert boxes_to_read(FLOAT8, (17, 10), index) == (codes_box, scales_box)


def test_a_box_of_mxfp4_needs_the_blocks_that_it_touches():
    index = slice(1, 2), slice(40, 65), slice(2, 5)
    held = (slice(1, 2), slice(2, 5), slice(1, 3))
    assert boxes_to_read(MXFP4, (2, 7, 3, 16), index) == ((*held, slice(0, 16)), held)
