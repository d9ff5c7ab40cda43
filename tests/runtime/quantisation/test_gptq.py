"""GPTQ gives the codes of the plain algorithm, and loses less than rounding to nearest."""

import numpy as np

from noria.runtime.quantisation import rounding
from noria.runtime.quantisation.rounding import DAMPING, gptq_codes

A, F, LARGEST = 60, 6, 7


def problem(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a weight, the Hessian of inputs that depend on each other, and scales."""
    rng = np.random.default_rng(seed)
    weight_AF = rng.normal(size=(A, F)).astype(np.float32)
    inputs_MA = rng.normal(size=(400, A)) @ rng.normal(size=(A, A))
    scales_AF = np.repeat(np.abs(weight_AF.reshape(-1, 20, F)).max(axis=1) / LARGEST, 20, axis=0)
    return weight_AF, (inputs_MA.T @ inputs_MA).astype(np.float32), scales_AF.astype(np.float32)


def plain_codes(weight_AF, hessian_AA, scales_AF) -> np.ndarray:
    """Round feature by feature, and move each error by the inverse Hessian of all later features.

    This is equation 2 of the paper, with the inverse computed anew for each feature.
    """
    weight_AF, hessian_AA = weight_AF.astype(np.float64), hessian_AA.astype(np.float64)
    hessian_AA += DAMPING * hessian_AA.diagonal().mean() * np.eye(A)
    remaining = sorted(range(A), key=lambda a: -hessian_AA[a, a])
    codes_AF = np.zeros((A, F), int)
    while remaining:
        inverse = np.linalg.inv(hessian_AA[np.ix_(remaining, remaining)])
        a, *later = remaining
        codes_AF[a] = np.clip(np.rint(weight_AF[a] / scales_AF[a]), -LARGEST, LARGEST)
        error_F = (weight_AF[a] - codes_AF[a] * scales_AF[a]) / inverse[0, 0]
        weight_AF[later] -= np.outer(inverse[1:, 0], error_F)
        remaining = later
    return codes_AF


def loss(weight_AF, codes_AF, scales_AF, hessian_AA) -> float:
    error_AF = (codes_AF * scales_AF - weight_AF).astype(np.float64)
    return float(np.einsum("AF,AX,XF->", error_AF, hessian_AA, error_AF))


def test_codes_are_those_of_the_plain_algorithm(monkeypatch):
    monkeypatch.setattr(rounding, "_BLOCK", 16)
    weight_AF, hessian_AA, scales_AF = problem()
    codes_AF = gptq_codes(weight_AF, hessian_AA, scales_AF, LARGEST)
    assert codes_AF.dtype == np.int8
    np.testing.assert_array_equal(codes_AF, plain_codes(weight_AF, hessian_AA, scales_AF))


def test_the_loss_is_far_below_that_of_rounding_to_nearest():
    weight_AF, hessian_AA, scales_AF = problem(1)
    nearest_AF = np.clip(np.rint(weight_AF / scales_AF), -LARGEST, LARGEST)
    codes_AF = gptq_codes(weight_AF, hessian_AA, scales_AF, LARGEST)
    losses = [loss(weight_AF, x, scales_AF, hessian_AA) for x in (codes_AF, nearest_AF)]
    assert losses[0] < 0.6 * losses[1]


def test_without_inputs_features_are_rounded_to_nearest():
    weight_AF, hessian_AA, scales_AF = problem()
    codes_AF = gptq_codes(weight_AF, np.zeros_like(hessian_AA), scales_AF, LARGEST)
    np.testing.assert_array_equal(codes_AF, np.rint(weight_AF / scales_AF))
