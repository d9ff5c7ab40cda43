"""Balance the features that products of a layer read, so that few of them are much larger.

A feature may be divided by a factor where it is made, if the weights that read it are multiplied by
the same factor. The model computes the same function. Features are made by the gains of a norm, by
the values of a head, and by `up` of an MLP. The factor is `sqrt(a / w)`, with the root mean squares
`a` of the feature over calibration tokens and `w` of the weights that read it; the geometric mean
of the factors of a product is 1.

Source: Xiao et al. 2022, "SmoothQuant" (2211.10438), equation 4 with a strength of 0.5, there with
maxima in place of root mean squares, and for features of norms.

Knows nothing of codes, files or calibration.
"""

from collections.abc import Callable, Mapping

import numpy as np

_SMALLEST = 1e-12
"""The least mean square, so that features that are always zero have a factor."""
_OF_NORMS = (("attention_norm.scale", "attention.qkv", 0), ("mlp_norm.scale", "mlp.gate_up", 1))
"""The gains of a norm, the weight that reads it, and the axis of the features in the weight."""
_QKV, _OUTPUT = "attention.qkv", "attention.output"


def smooth_layer(
    weights: Mapping[str, np.ndarray],
    mean_square: Callable[[str], np.ndarray],
    norm_offset: float = 0.0,
) -> dict[str, np.ndarray]:
    """The smoothed weights of a layer.

    Experts, and the norm that they read, stay as they are, as experts keep float activations.

    Args:
      weights: The parameters of the layer in float32, by their paths in the layer.
      mean_square: Returns the mean squares of the input features of a weight over calibration
        tokens.
      norm_offset: The offset that is added to stored gains.
    """
    smoothed = {path: weight.copy() for path, weight in weights.items()}
    for gains, path, axis in _OF_NORMS:
        if gains in weights and path in weights and not _has_experts(path, weights):
            others = tuple(x for x in range(weights[path].ndim) if x != axis)
            of_weight_D = np.square(weights[path]).mean(axis=others)
            factor_D = _factors(mean_square(path), of_weight_D)
            smoothed[gains] = (weights[gains] + norm_offset) / factor_D - norm_offset
            smoothed[path] *= np.expand_dims(factor_D, others)
    if _QKV in weights:
        _smooth_values(smoothed, mean_square)
    for path in weights:
        mlp, _, name = path.rpartition(".")
        if name == "down" and not _has_experts(path, weights):
            factor_F = _factors(mean_square(path), np.square(weights[path]).mean(axis=1))
            smoothed[path] *= factor_F[:, None]
            for up in (f"{mlp}.gate_up", f"{mlp}.gate_up_bias"):
                if up in weights:
                    smoothed[up][1] /= factor_F
    return smoothed


def _smooth_values(
    smoothed: dict[str, np.ndarray], mean_square: Callable[[str], np.ndarray]
) -> None:
    """Smooth the values of heads; the query heads of a value head share its factors."""
    output_KGHD = smoothed[_OUTPUT]
    by_head_KGH = mean_square(_OUTPUT).reshape(output_KGHD.shape[:3])
    of_output_KH = np.square(output_KGHD).mean(axis=(1, 3))
    factor_KH = _factors(by_head_KGH.mean(axis=1), of_output_KH)
    output_KGHD *= factor_KH[:, None, :, None]
    for path in (_QKV, f"{_QKV}_bias"):
        if path in smoothed:
            smoothed[path][..., -1, :] /= factor_KH


def _has_experts(path: str, weights: Mapping[str, np.ndarray]) -> bool:
    """Whether a weight is that of experts, which are beside their router."""
    return f"{path.rpartition('.')[0]}.router" in weights


def _factors(mean_square: np.ndarray, of_weight: np.ndarray) -> np.ndarray:
    """The factors of features, in float32."""
    of_features, of_weight = (
        np.maximum(x.astype(np.float64), _SMALLEST) for x in (mean_square, of_weight)
    )
    factors = (of_features / of_weight) ** 0.25
    return (factors / np.exp(np.log(factors).mean())).astype(np.float32)
