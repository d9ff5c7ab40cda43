"""One layer of a decoder on calibration prompts: sums over the input of a product, and its output.

A sum is that of outer products, or its diagonal: the sum of squares.

Layers of one kind share compiled programs. Runs on one device, in float32. Knows nothing of
quantisation, files or texts.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from ..modelzoo.config import DecoderConfig
from ..modelzoo.decoder import Decoder
from ..modelzoo.operations import ON_ONE_DEVICE, Operations
from ..modelzoo.products import parameter_names, record_layer
from ..modelzoo.weight_products import Axes, Product
from .abstract_model import AbstractModel

if TYPE_CHECKING:
    from ..modelzoo.weight_products import Weight

_PREFIX = "layers.0."


class _InputSum(Operations):
    """The operations of one device, which sum products of the input of a weight with itself."""

    def __init__(self, weight: int, is_token_BT: jax.Array, equation: str):
        """Create operations that watch the weight with this `id`."""
        self._weight, self._is_token_BT, self._equation = weight, is_token_BT, equation
        self.sum: jax.Array | None = None

    def project(
        self, equation: str, product: Product, x: jax.Array, weight: "Weight", x_axes: Axes = (),
        out_axes: Axes = (), dtype: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:  # fmt: skip
        if id(weight) == self._weight:
            is_token_M1 = self._is_token_BT.reshape(-1, 1)
            x_MA = jnp.where(is_token_M1, x.reshape(len(is_token_M1), -1), 0)
            self.sum = jnp.einsum(self._equation, x_MA, x_MA, precision="highest")
        return super().project(equation, product, x, weight, x_axes, out_axes, dtype)


class CalibrationLayer:
    """The programs of one kind of layer; each compiles at its first call."""

    def __init__(self, config: DecoderConfig, layer: int):
        """Define the programs of the layers of the kind of `layer`."""
        self._model = AbstractModel(config.select_layers(slice(layer, layer + 1)))
        by_input: dict[int, list[str]] = {}
        for product in record_layer(config, layer, 1, reads_cache=False).products:
            by_input.setdefault(product.reads, []).append(product.parameter)
        self.products = tuple(map(tuple, by_input.values()))
        """The weights of the layer's products in their order, those with the same input together.
        Experts are not among them."""
        self._input_sum = jax.jit(
            self._trace_input_sum, static_argnames=("parameter", "is_diagonal")
        )
        self._output = jax.jit(self._trace_output)

    def input_sum(
        self,
        parameters: Mapping[str, jax.Array],
        x_BTD: jax.Array,
        true_length_B: jax.Array,
        parameter: str,
        *,
        is_diagonal: bool = False,
    ) -> jax.Array:
        """The sum `[A, A]` over all tokens of the outer products of the input of a weight.

        Args:
          parameters: The parameters of the layer, by their paths in the layer.
          x_BTD: The residual stream before the layer.
          true_length_B: The number of tokens of each prompt.
          parameter: The path of the weight in the layer.
          is_diagonal: Whether only the diagonal `[A]` is computed.
        """
        return self._input_sum(
            parameters, x_BTD, true_length_B, parameter=parameter, is_diagonal=is_diagonal
        )

    def output(
        self, parameters: Mapping[str, jax.Array], x_BTD: jax.Array, true_length_B: jax.Array
    ) -> jax.Array:
        """The residual stream after the layer; see `input_sum`."""
        return self._output(parameters, x_BTD, true_length_B)

    def _trace_input_sum(
        self,
        parameters: Mapping[str, jax.Array],
        x_BTD: jax.Array,
        true_length_B: jax.Array,
        parameter: str,
        is_diagonal: bool,
    ) -> jax.Array:
        decoder = self._bind(parameters)
        (weight,) = (
            i for i, name in parameter_names(decoder.layers[0]).items() if name == parameter
        )
        is_token_BT = jnp.arange(x_BTD.shape[1])[None] < true_length_B[:, None]
        equation = "MA,MA->A" if is_diagonal else "MA,MX->AX"
        operations = _InputSum(weight, is_token_BT, equation)
        decoder.operations = operations
        decoder.run_layers(x_BTD, true_length_B)
        assert operations.sum is not None, parameter
        return operations.sum

    def _trace_output(
        self, parameters: Mapping[str, jax.Array], x_BTD: jax.Array, true_length_B: jax.Array
    ) -> jax.Array:
        return self._bind(parameters).run_layers(x_BTD, true_length_B)

    def _bind(self, parameters: Mapping[str, jax.Array]) -> Decoder:
        """The decoder of one layer; its other parameters are zeros that nothing reads."""
        abstract = self._model.abstract_parameters(jnp.float32)
        values = {
            name: parameters[name.removeprefix(_PREFIX)]
            if name.startswith(_PREFIX)
            else jnp.zeros(leaf.shape, leaf.dtype)
            for name, leaf in abstract.items()
        }
        return self._model.bind(values, ON_ONE_DEVICE)
