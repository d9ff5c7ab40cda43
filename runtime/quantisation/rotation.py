"""Rotate the residual stream and the values of a model, so that few features of them are large.

An orthogonal matrix R turns the residual stream `x` into `x R`: weights that write to the stream
are multiplied by R, and those that read from it by its transpose. A root mean square norm does not
change under R, but its gains do, so they become factors of the weights that read the norm. Values
of heads are turned in the same way between the weights of values and of the output. The model
computes the same function, with gains of 1 and a head of its own.

R is a random Hadamard matrix: an orthogonal matrix whose entries all have the same magnitude, with
random signs of its rows. For sizes that are no power of two, R is the Kronecker product of such a
matrix and a random orthogonal one, also with random signs of its rows.

Sources: Ashkboos et al. 2024, "QuaRot" (2404.00456), section 4, without the rotations that the
running model would compute; Tseng et al. 2024, "QuIP#" (2402.04396), for other sizes.

Knows nothing of codes, files or calibration.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy.linalg import hadamard

from ...modelzoo.config import DecoderConfig
from ..errors import InvalidConfig

_SEED = 0
_LAYERS = "layers."
_READERS = {
    "attention.qkv": ("attention_norm", 0),
    "mlp.gate_up": ("mlp_norm", -2),
    "mlp.router": ("mlp_norm", 0),
    "mlp.shared.gate_up": ("mlp_norm", -2),
    "mlp.shared_gate": ("mlp_norm", 0),
    "head.table": ("final_norm", 1),
}
"""The norm that a weight reads, and the axis of its input features, by its path in a layer."""
_NORM_SCALES = {f"{norm}.scale" for norm, _ in _READERS.values()}
_WRITERS = (
    "embedding.table",
    "attention.output",
    "attention.output_bias",
    "mlp.down",
    "mlp.down_bias",
    "mlp.shared.down",
    "mlp.shared.down_bias",
)
"""Parameters that write to the residual stream, which is their last axis."""


class Rotation:
    """The weights of a rotated model."""

    def __init__(self, config: DecoderConfig, read: Callable[[str], np.ndarray]):
        """Choose the rotations of a model.

        Args:
          config: The model.
          read: Reads a parameter of the model in float32, by its path.

        Raises:
          InvalidConfig: The model would compute something else if it were rotated.
        """
        reasons = {
            "layer norms": config.norm != "rms",
            "norms of the outputs of blocks": any(
                layer.norm_placement != "before" for layer in config.layers
            ),
            "parallel blocks": any(layer.is_parallel for layer in config.layers),
            "latent attention": any(attention.latent for attention in config.attentions),
            "heads of several sizes": len({x.head_dim for x in config.attentions}) > 1,
        }
        if found := [reason for reason, is_found in reasons.items() if is_found]:
            raise InvalidConfig(
                f"--rotate: expected a model with root mean square norms before its blocks, and "
                f"with keys and values of heads, got one with {' and '.join(found)}. Quantise it "
                f"without --rotate."
            )
        self._read, self._offset = read, config.norm_offset
        self._head = "embedding.table" if config.tie_embeddings else "head.table"
        rng = np.random.default_rng(_SEED)
        self._stream_DD = _random_hadamard(config.embed, rng)
        self._values_HH = _random_hadamard(config.attentions[0].head_dim, rng)
        self.config = replace(config, tie_embeddings=False)
        """The rotated model."""

    def read(self, path: str) -> np.ndarray:
        """A parameter of the rotated model in float32."""
        prefix, name = "", path
        if path.startswith(_LAYERS):
            layer, name = path.removeprefix(_LAYERS).split(".", 1)
            prefix = f"{_LAYERS}{layer}."
        weight = self._read(self._head if path == "head.table" else path)
        if name in _NORM_SCALES:
            return np.full_like(weight, 1 - self._offset)
        if name in _READERS:
            norm, axis = _READERS[name]
            gains_D = self._read(f"{prefix}{norm}.scale") + np.float32(self._offset)
            weight = _multiply(weight, gains_D[:, None] * self._stream_DD, axis)
        if name in ("attention.qkv", "attention.qkv_bias"):
            weight[..., -1, :] = weight[..., -1, :] @ self._values_HH
        if name == "attention.output":
            weight = _multiply(weight, self._values_HH, -2)
        return weight @ self._stream_DD if name in _WRITERS else weight


def _multiply(weight: np.ndarray, matrix_XY: np.ndarray, axis: int) -> np.ndarray:
    """Multiply the features along an axis with the transpose of a matrix."""
    return np.ascontiguousarray(np.moveaxis(np.moveaxis(weight, axis, -1) @ matrix_XY, -1, axis))


def _random_hadamard(size: int, rng: np.random.Generator) -> np.ndarray:
    """A random orthogonal matrix in float32, with entries of one magnitude for powers of two."""
    power = size & -size
    # a random orthogonal matrix of the odd factor; of size one it is a sign
    other, _ = np.linalg.qr(rng.normal(size=(size // power, size // power)))
    signs = rng.choice([-1.0, 1.0], size)
    return (signs[:, None] * np.kron(hadamard(power) / power**0.5, other)).astype(np.float32)
