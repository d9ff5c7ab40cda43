"""A plain quantiser in numpy, one group of input features at a time: the reference of tests."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np

from noria.modelzoo.weights.weight_formats import SCALES, Quantisation

LARGEST = {"int8": 127, "float8_e4m3fn": 448, "int4": 7}
DTYPES = {"int8": np.int8, "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "int4": np.int8}


def quantise(weight: np.ndarray, quantisation: Quantisation) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and scales of a float32 weight, rounded to nearest."""
    inputs, name = quantisation.inputs, quantisation.format.codes
    largest = LARGEST[name]
    features_AF, before = _as_matrix(weight, inputs)
    A = len(features_AF)
    group = quantisation.format.group or A
    codes_AF, scales = np.empty(features_AF.shape, DTYPES[name]), []
    for start in range(0, A, group):
        part = features_AF[start : start + group]
        scale_F = (np.abs(part).max(axis=0) / np.float32(largest)).astype(np.float32)
        scale_F[scale_F == 0] = 1
        values = np.clip(part / scale_F, -largest, largest)
        codes_AF[start : start + group] = np.rint(values) if DTYPES[name] == np.int8 else values
        scales.append(scale_F)
    outer, inner = _outer_inner(weight.shape, inputs)
    scales_GF = np.stack(scales)
    scales = np.moveaxis(scales_GF.reshape(-1, *outer, *inner), 0, before)
    codes = np.moveaxis(codes_AF.reshape(A, *outer, *inner), 0, before).reshape(weight.shape)
    return codes.astype(name), scales


def dequantised(weight: np.ndarray, quantisation: Quantisation) -> np.ndarray:
    """Return the values of a weight in codes: codes times scales, as float32."""
    codes, scales = quantise(weight, quantisation)
    codes_AF, before = _as_matrix(codes.astype(np.float32), quantisation.inputs)
    scales = np.moveaxis(scales, before, 0).reshape(scales.shape[before], -1)
    values_AF = codes_AF * np.repeat(scales, len(codes_AF) // len(scales), axis=0)
    outer, inner = _outer_inner(weight.shape, quantisation.inputs)
    return np.moveaxis(values_AF.reshape(-1, *outer, *inner), 0, before).reshape(weight.shape)


def in_codes(
    weights: Mapping[str, np.ndarray], quantisations: Mapping[str, Quantisation]
) -> dict[str, np.ndarray]:
    """Return codes and scales of weights, under the names of parameters."""
    arrays = {}
    for name, quantisation in quantisations.items():
        arrays[name], arrays[name + SCALES] = quantise(weights[name], quantisation)
    return arrays


def _outer_inner(shape: tuple[int, ...], inputs: tuple[int, ...]) -> tuple[tuple, tuple]:
    """Return the sizes of the axes before and after the inputs."""
    return shape[: inputs[0]], shape[len(shape) + inputs[-1] + 1 :]


def _as_matrix(weight: np.ndarray, inputs: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """Return a weight as `[input features, output features]`, and the number of axes before."""
    outer, inner = _outer_inner(weight.shape, inputs)
    joined = weight.reshape(*outer, -1, *inner)
    return np.moveaxis(joined, len(outer), 0).reshape(joined.shape[len(outer)], -1), len(outer)
