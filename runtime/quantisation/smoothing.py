"""Balance the hidden features of an MLP, so that few of them are much larger than the others.

The activations that `down` reads are linear in `up`, so a feature of `up` may be divided by a
factor that multiplies the same feature of `down`. The model computes the same function. The factor
is `sqrt(a / w)`, with the root mean squares `a` of the feature over calibration tokens and `w` of
its row in `down`; all factors are scaled so that their geometric mean is 1.

Source: Xiao et al. 2022, "SmoothQuant" (2211.10438), equation 4 with a strength of 0.5, there with
maxima in place of root mean squares and for the inputs of the products behind norms.

Knows nothing of codes, files or layers.
"""

from collections.abc import Mapping

import numpy as np

_SMALLEST = 1e-6
"""The least root mean square, so that features that are always zero have a factor."""


def smooth_mlp(
    weights: Mapping[str, np.ndarray], mlp: str, mean_square_F: np.ndarray
) -> dict[str, np.ndarray]:
    """The changed weights of an MLP.

    Args:
      weights: The parameters of a layer in float32.
      mlp: The path of the MLP in the layer.
      mean_square_F: The mean squares of the hidden features over calibration tokens.
    """
    down_FD, gate_up, bias = f"{mlp}.down", f"{mlp}.gate_up", f"{mlp}.gate_up_bias"
    of_down_F = np.square(weights[down_FD]).mean(axis=1)
    factor_F = (_at_least(mean_square_F) / _at_least(of_down_F)) ** 0.25
    factor_F = (factor_F / np.exp(np.log(factor_F).mean())).astype(np.float32)
    changed = {down_FD: weights[down_FD] * factor_F[:, None]}
    for path in (gate_up, bias):
        if path in weights:
            changed[path] = weights[path].copy()
            changed[path][1] /= factor_F
    return changed


def _at_least(mean_square_F: np.ndarray) -> np.ndarray:
    return np.maximum(mean_square_F.astype(np.float64), _SMALLEST**2)
