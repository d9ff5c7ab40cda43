"""A plain quantiser, and writers of quantised matrices in published formats: references of tests.

A format joins the conformance tests of published formats by being listed in `FORMATS`. Codes are
packed one by one, as the formats' documents say.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Kept:
    """The format in which a plan keeps the codes of a matrix."""

    codes: str
    group: int
    scales: str
    has_offsets: bool = False


@dataclass(frozen=True)
class PublishedForm:
    """A format: its `quantization_config`, and a writer of matrices `[outputs, inputs]`."""

    name: str
    config: Mapping[str, Any]
    write: Callable[[str, np.ndarray], tuple[Arrays, np.ndarray]]
    """Returns the stored arrays of a matrix with a name, and their values in float32."""
    kept: Kept


@dataclass(frozen=True)
class Codes:
    """Unsigned codes of a matrix, with the scales and zero points of its groups."""

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray
    group_of_input: np.ndarray

    @property
    def values(self) -> np.ndarray:
        columns = self.group_of_input
        steps = self.codes.astype(np.float32) - self.zeros[:, columns].astype(np.float32)
        return steps * self.scales[:, columns].astype(np.float32)


def quantise(
    weight: np.ndarray,
    bits: int,
    group: int,
    scale_dtype: Any = np.float16,
    *,
    is_symmetric: bool = False,
    is_ordered: bool = False,
) -> Codes:
    """Round a matrix to codes; with `is_ordered`, groups have inputs of any positions."""
    outputs, inputs = weight.shape
    group = group or inputs
    group_of_input = np.arange(inputs) // group
    if is_ordered:
        # the same order for all matrices with these inputs, as they share activations
        group_of_input = np.random.default_rng(inputs).permutation(group_of_input)
    codes = np.empty(weight.shape, np.uint8)
    scales = np.empty((outputs, inputs // group), scale_dtype)
    zeros = np.empty(scales.shape, np.int32)
    top = 2**bits - 1
    for g in range(inputs // group):
        members = group_of_input == g
        part = weight[:, members]
        low, high = part.min(axis=1), part.max(axis=1)
        if is_symmetric:
            high = np.abs(part).max(axis=1)
            low = -high
        scales[:, g] = ((high - low) / top).astype(scale_dtype)
        scale = scales[:, g].astype(np.float32)
        zeros[:, g] = 2 ** (bits - 1) if is_symmetric else np.clip(np.rint(-low / scale), 1, top)
        steps = np.rint(part / scale[:, None]) + zeros[:, g, None]
        codes[:, members] = np.clip(steps, 0, top)
    return Codes(codes, scales, zeros, group_of_input)


def pack(codes: np.ndarray, axis: int, bits: int, order: tuple[int, ...] | None = None):
    """Pack codes into int32 words along an axis, the first of `order` in the lowest bits."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    codes = np.moveaxis(codes, axis, 0).astype(np.uint64)
    words = np.zeros((-(-len(codes) // per_word), *codes.shape[1:]), np.uint64)
    for word in range(len(words)):
        for place, member in enumerate(order):
            if word * per_word + member < len(codes):
                words[word] |= codes[word * per_word + member] << np.uint64(place * bits)
    words = np.moveaxis(words, 0, axis).astype(np.uint32).view(np.int32)
    return np.ascontiguousarray(words)


def write_gptq(
    name: str,
    weight: np.ndarray,
    *,
    bits: int = 4,
    group: int = 16,
    is_symmetric: bool = False,
    is_ordered: bool = False,
    zero_bias: int = 1,
) -> tuple[Arrays, np.ndarray]:
    found = quantise(weight, bits, group, is_symmetric=is_symmetric, is_ordered=is_ordered)
    name = name.removesuffix(".weight")
    stored = {
        f"{name}.qweight": pack(found.codes.T, 0, bits),
        f"{name}.qzeros": pack((found.zeros - zero_bias).T, 1, bits),
        f"{name}.scales": np.ascontiguousarray(found.scales.T),
        f"{name}.g_idx": found.group_of_input.astype(np.int32),
    }
    return stored, found.values


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def write_awq(name: str, weight: np.ndarray) -> tuple[Arrays, np.ndarray]:
    found = quantise(weight, 4, 16)
    name = name.removesuffix(".weight")
    stored = {
        f"{name}.qweight": pack(found.codes.T, 1, 4, AWQ_ORDER),
        f"{name}.qzeros": pack(found.zeros.T, 1, 4, AWQ_ORDER),
        f"{name}.scales": np.ascontiguousarray(found.scales.T),
    }
    return stored, found.values


def write_packed(
    name: str, weight: np.ndarray, *, bits: int = 4, group: int = 16, is_symmetric: bool = True
) -> tuple[Arrays, np.ndarray]:
    dtype = ml_dtypes.bfloat16
    found = quantise(weight, bits, group, dtype, is_symmetric=is_symmetric)
    stored = {
        f"{name}_packed": pack(found.codes, 1, bits),
        f"{name}_scale": found.scales,
        f"{name}_shape": np.array(weight.shape, np.int64),
    }
    if not is_symmetric:
        stored[f"{name}_zero_point"] = pack(found.zeros, 0, bits)
    return stored, found.values


def write_int8(
    name: str,
    weight: np.ndarray,
    *,
    bits: int = 8,
    group: int = 0,
    is_symmetric: bool = True,
    whole: bool = False,
    scale_dtype: Any = np.float32,
) -> tuple[Arrays, np.ndarray]:
    rows = weight.reshape(1, -1) if whole else weight
    found = quantise(rows, bits, group, scale_dtype, is_symmetric=is_symmetric)
    half = 2 ** (bits - 1)
    codes = (found.codes.astype(np.int16) - half).astype(np.int8).reshape(weight.shape)
    scales = found.scales.reshape(1) if whole else found.scales
    stored = {name: codes, f"{name}_scale": scales}
    if not is_symmetric:
        stored[f"{name}_zero_point"] = (found.zeros - half).astype(np.int8)
    return stored, found.values.reshape(weight.shape)


def write_float8(
    name: str,
    weight: np.ndarray,
    *,
    block: tuple[int, int],
    suffix: str = "_scale",
    scale_dtype: Any = ml_dtypes.bfloat16,
) -> tuple[Arrays, np.ndarray]:
    """Write float8 with a scale for each block of rows and columns; 0 is all of an axis."""
    rows, columns = (size or length for size, length in zip(block, weight.shape, strict=True))
    shape = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    scales, codes = np.empty(shape, scale_dtype), np.empty(weight.shape, ml_dtypes.float8_e4m3fn)
    values = np.empty(weight.shape, np.float32)
    for i, j in np.ndindex(*shape):
        box = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        scales[i, j] = np.abs(weight[box]).max() / 448
        scale = np.float32(scales[i, j])
        codes[box] = np.clip(weight[box] / scale, -448, 448).astype(codes.dtype)
        values[box] = codes[box].astype(np.float32) * scale
    return {name: codes, f"{name}{suffix}": scales}, values


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    """Return a `quantization_config` as llm-compressor writes it."""
    scheme = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False} | weights,
        "input_activations": None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


def _gptq(**changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 16,
        "desc_act": False,
        "sym": False,
        "damp_percent": 0.01,
    } | changes


PACKED, INT, FLOAT = "pack-quantized", "int-quantized", "float-quantized"
GROUP = {"num_bits": 4, "strategy": "group", "group_size": 16}
E4M3 = "float8_e4m3fn"
AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"
}  # fmt: skip
DEEPSEEK = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
    "weight_block_size": [16, 32],
}  # fmt: skip

FORMATS = (
    PublishedForm(
        "compressed int8 by channel",
        compressed(INT, strategy="channel"),
        write_int8,
        Kept("int8", 0, "float32"),
    ),
    PublishedForm(
        "compressed int8 by tensor",
        compressed(INT, strategy="tensor"),
        partial(write_int8, whole=True),
        Kept("int8", 0, "float32"),
    ),
    PublishedForm(
        "compressed int8 with zero points",
        compressed(INT, strategy="channel", symmetric=False),
        partial(write_int8, is_symmetric=False, scale_dtype=ml_dtypes.bfloat16),
        Kept("int8", 0, "bfloat16", has_offsets=True),
    ),
    PublishedForm(
        "compressed int4 with zero points, not packed",
        compressed(INT, **GROUP, symmetric=False),
        partial(write_int8, bits=4, group=16, is_symmetric=False, scale_dtype=ml_dtypes.bfloat16),
        Kept("uint4", 16, "bfloat16", has_offsets=True),
    ),
    PublishedForm(
        "compressed int4 in groups",
        compressed(PACKED, **GROUP),
        write_packed,
        Kept("int4", 16, "bfloat16"),
    ),
    PublishedForm(
        "compressed int4 with zero points",
        compressed(PACKED, **GROUP, symmetric=False),
        partial(write_packed, is_symmetric=False),
        Kept("uint4", 16, "bfloat16", has_offsets=True),
    ),
    PublishedForm(
        "compressed int8 packed",
        compressed(PACKED, strategy="channel"),
        partial(write_packed, bits=8, group=0),
        Kept("int8", 0, "bfloat16"),
    ),
    PublishedForm(
        "compressed float8 by channel",
        compressed(FLOAT, type="float", strategy="channel"),
        partial(write_float8, block=(1, 0)),
        Kept(E4M3, 0, "bfloat16"),
    ),
    PublishedForm(
        "compressed float8 by tensor",
        compressed(FLOAT, type="float", strategy="tensor"),
        partial(write_float8, block=(0, 0)),
        Kept(E4M3, 0, "bfloat16"),
    ),
    PublishedForm(
        "compressed float8 by block",
        compressed(FLOAT, type="float", strategy="block", block_structure=[16, 32]),
        partial(write_float8, block=(16, 32)),
        Kept(E4M3, 32, "bfloat16"),
    ),
    PublishedForm(
        "GPTQ of 4 bits", _gptq(), write_gptq, Kept("uint4", 16, "float16", has_offsets=True)
    ),
    PublishedForm(
        "GPTQ without zero points",
        _gptq(sym=True),
        partial(write_gptq, is_symmetric=True),
        Kept("int4", 16, "float16"),
    ),
    PublishedForm(
        "GPTQ of 8 bits, version 2",
        _gptq(bits=8, group_size=-1, checkpoint_format="gptq_v2"),
        partial(write_gptq, bits=8, group=0, zero_bias=0),
        Kept("int8", 0, "float16", has_offsets=True),
    ),
    PublishedForm("AWQ", AWQ, write_awq, Kept("uint4", 16, "float16", has_offsets=True)),
    PublishedForm(
        "float8 by block",
        DEEPSEEK,
        partial(write_float8, block=(16, 32), suffix="_scale_inv", scale_dtype=np.float32),
        Kept(E4M3, 32, "float32"),
    ),
)
ACT_ORDER = PublishedForm(
    "GPTQ with act-order",
    _gptq(desc_act=True),
    partial(write_gptq, is_ordered=True),
    Kept("uint4", 16, "float16", has_offsets=True),
)


@dataclass(frozen=True)
class Written:
    """A model in a format: its stored tensors, and the same tensors as numbers."""

    stored: Arrays = field(default_factory=dict)
    numbers: Arrays = field(default_factory=dict)


def write_model(tensors: Mapping[str, np.ndarray], form: PublishedForm) -> Written:
    """Write the projections of a model in a format, and the other tensors as they are."""
    written = Written()
    for name, values in tensors.items():
        if name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")):
            stored, numbers = form.write(name, values)
        else:
            stored, numbers = {name: values}, values
        written.stored.update(stored)
        written.numbers[name] = np.ascontiguousarray(numbers)
    return written
