"""The residual stream of calibration rows, layer by layer, and the Hessians of a layer's products.

An expert has the Hessian of the tokens that its router sends to it. Rows are cut to at most
`MAX_LENGTH` tokens and run in batches of one shape, so programs of a kind of layer compile once.
Knows nothing of files, texts or codes.
"""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ...compile.graphs.layer_steps import CalibrationLayer
from ...modelzoo.config import DecoderConfig

MAX_LENGTH = 512
"""The number of tokens at which rows are cut."""
BATCH_TOKENS = 2048
"""The maximum number of tokens of a batch, padding included."""


class Calibration:
    """The residual stream of all rows before the next layer, in host memory."""

    def __init__(self, config: DecoderConfig, rows: Sequence[Sequence[int]], table_VD: np.ndarray):
        """Embed the token ids of rows.

        Args:
          config: The decoder.
          rows: Token ids; at least one row.
          table_VD: The table of embeddings in float32.
        """
        rows = sorted((row[:MAX_LENGTH] for row in rows), key=len)
        self.num_tokens = sum(map(len, rows))
        length = len(rows[-1])
        batch = max(1, BATCH_TOKENS // length)
        self._config = config
        self._kinds: dict[object, CalibrationLayer] = {}
        self._batches: list[tuple[np.ndarray, np.ndarray]] = []
        for start in range(0, len(rows), batch):
            ids_BT = np.zeros((batch, length), np.int32)
            length_B = np.zeros(batch, np.int32)
            for b, row in enumerate(rows[start : start + batch]):
                ids_BT[b, : len(row)], length_B[b] = row, len(row)
            x_BTD = table_VD[ids_BT] * np.float32(config.multipliers.embedding)
            self._batches.append((x_BTD, length_B))

    def layer(self, layer: int) -> CalibrationLayer:
        """The programs of a layer."""
        kind = self._config.layers[layer]
        if kind not in self._kinds:
            self._kinds[kind] = CalibrationLayer(self._config, layer)
        return self._kinds[kind]

    def hessian(
        self, layer: int, parameters: Mapping[str, np.ndarray], parameter: str
    ) -> np.ndarray:
        """The sum `[A, A]` of the outer products of the input of a weight, over all tokens.

        Args:
          layer: The next layer.
          parameters: Its parameters in float32, by their paths in the layer.
          parameter: The path of the weight in the layer.
        """
        return self._sum(layer, parameters, parameter, is_diagonal=False)

    def mean_square(
        self, layer: int, parameters: Mapping[str, np.ndarray], parameter: str
    ) -> np.ndarray:
        """The mean squares `[A]` of the input of a weight over all tokens; see `hessian`."""
        return self._sum(layer, parameters, parameter, is_diagonal=True) / self.num_tokens

    def _sum(
        self, layer: int, parameters: Mapping[str, np.ndarray], parameter: str, *, is_diagonal: bool
    ) -> np.ndarray:
        program, own = self.layer(layer), _on_device(parameters)
        total: np.ndarray | None = None
        for x_BTD, length_B in self._batches:
            x_BTD, length_B = jnp.asarray(x_BTD), jnp.asarray(length_B)
            sums = program.input_sum(own, x_BTD, length_B, parameter, is_diagonal=is_diagonal)
            part = np.asarray(sums)
            total = part.copy() if total is None else np.add(total, part, out=total)
        assert total is not None, "there are rows"
        return total

    def expert_tokens(self, layer: int, parameters: Mapping[str, np.ndarray]) -> "ExpertTokens":
        """The tokens of each expert of a sparse layer; see `hessian`."""
        program, own = self.layer(layer), _on_device(parameters)
        inputs = [
            # to the host, as a device may not have room for the inputs of all batches
            jax.device_get(program.expert_input(own, jnp.asarray(x_BTD), jnp.asarray(length_B)))
            for x_BTD, length_B in self._batches
        ]
        joined = map(np.concatenate, zip(*inputs, strict=True))
        return ExpertTokens(*joined, weighs_input=program.weighs_input)

    def advance(self, layer: int, parameters: Mapping[str, np.ndarray]) -> None:
        """Run a layer, after which the residual stream is that before the next layer."""
        program, own = self.layer(layer), _on_device(parameters)
        for i, (x_BTD, length_B) in enumerate(self._batches):
            x_BTD = program.output(own, jnp.asarray(x_BTD), jnp.asarray(length_B))
            self._batches[i] = np.asarray(x_BTD), length_B


class ExpertTokens:
    """The calibration tokens of each expert of a layer."""

    def __init__(
        self,
        x_MD: np.ndarray,
        expert_MZ: np.ndarray,
        weight_MZ: np.ndarray,
        *,
        weighs_input: bool,
    ):
        """Take an `ExpertInput`, and whether routing weights multiply the inputs of experts."""
        self._x_MD, self._expert_MZ, self._weight_MZ = x_MD, expert_MZ, weight_MZ
        self._weighs_input = weighs_input

    def inputs(self, expert: int) -> np.ndarray:
        """The inputs `[U, D]` of gate and up of an expert."""
        token_U, choice_U = np.nonzero(self._expert_MZ == expert)
        x_UD = self._x_MD[token_U]
        if self._weighs_input:
            x_UD *= self._weight_MZ[token_U, choice_U, None]
        return x_UD


def _on_device(parameters: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(array) for name, array in parameters.items()}
