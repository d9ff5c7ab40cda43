"""One layer of a decoder on calibration prompts: its output, and the inputs of its products.

The input of a product is given as a sum over tokens: of outer products, or of squares. Inputs of
experts are given by token, because each expert has inputs of its own.

Layers of one kind share compiled programs. Runs on one device, in float32. Knows nothing of
quantisation, files or texts.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...modelzoo.config import DecoderConfig
from ...modelzoo.decoder import Decoder
from ...modelzoo.layer_config import Experts
from ...modelzoo.moe.experts import ExpertWeights, hidden
from ...modelzoo.moe.layer import gated_unit
from ...modelzoo.moe.mix import Mixture, MoeOutput
from ...modelzoo.moe.routing import Router, route
from ...modelzoo.operations import ON_ONE_DEVICE, Operations
from ...modelzoo.products import parameter_names, record_layer
from ...modelzoo.weights.product import Product
from ...modelzoo.weights.weight_products import Axes, multiply
from ..abstract_model import AbstractModel

if TYPE_CHECKING:
    from ...modelzoo.weights.weight_products import Weight

_PREFIX = "layers.0."
_TILE = 256
"""The tokens of one call of an expert: experts with any load share one compiled program."""


class ExpertInput(NamedTuple):
    """The input of the experts of a layer, and the experts of each token."""

    x_MD: jax.Array
    expert_MZ: jax.Array
    """The experts of each token; the number of experts means no expert."""
    weight_MZ: jax.Array
    """The routing weights of these experts."""


class _InputSum(Operations):
    """The operations of one device, which sum products of the input of a weight with itself."""

    def __init__(self, weight: int, is_token_BT: jax.Array, equation: str):
        """Create operations that watch the weight with this `id`."""
        self._weight, self._is_token_BT, self._equation = weight, is_token_BT, equation
        self.sum: jax.Array | None = None

    def project(
        self, product: Product, x: jax.Array, weight: "Weight", x_axes: Axes = (),
        out_axes: Axes = (), dtype: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:  # fmt: skip
        if id(weight) == self._weight:
            is_token_M1 = self._is_token_BT.reshape(-1, 1)
            x_MA = jnp.where(is_token_M1, x.reshape(len(is_token_M1), -1), 0)
            self.sum = jnp.einsum(self._equation, x_MA, x_MA, precision="highest")
        return super().project(product, x, weight, x_axes, out_axes, dtype)


class _ExpertInput(Operations):
    """The operations of one device, which keep the input of experts."""

    input: ExpertInput

    def mix_experts(
        self, mixture: Mixture, x_BTD: jax.Array, is_token_BT: jax.Array, router: Router,
        weights: ExpertWeights,
    ) -> MoeOutput:  # fmt: skip
        choices = route(x_BTD, is_token_BT, router, mixture.routing, mixture.project)
        self.input = ExpertInput(x_BTD.reshape(-1, x_BTD.shape[-1]), *choices)
        return super().mix_experts(mixture, x_BTD, is_token_BT, router, weights)


class CalibrationLayer:
    """The programs of one kind of layer; each compiles at its first call."""

    def __init__(self, config: DecoderConfig, layer: int):
        """Define the programs for all layers of the same kind as `layer`."""
        self._model = AbstractModel(replace(config, layers=config.layers[layer : layer + 1]))
        by_input: dict[int, list[str]] = {}
        record = record_layer(config, layer, 1, reads_cache=False)
        for product in record.products:
            by_input.setdefault(product.reads, []).append(product.parameter)
        self.products = tuple(map(tuple, by_input.values()))
        """The weights of the layer's products in their order, those with the same input together.
        Experts are not among them."""
        self.experts = tuple(product.parameter for product in record.expert_products)
        """The weights of experts, gate and up before down; empty in a dense layer."""
        self.input_sum = jax.jit(
            self._trace_input_sum, static_argnames=("parameter", "is_diagonal")
        )
        self.expert_input = jax.jit(self._trace_expert_input)
        """The input of the experts of a sparse layer; see `_trace_input_sum`."""
        self.output = jax.jit(lambda weights, *inputs: _run_whole(self._bind(weights), *inputs))
        """The residual stream after the layer; see `_trace_input_sum`."""
        options = self._model.config.layers[0].feed_forward
        if isinstance(options, Experts):
            self.weighs_input = options.moe.routing.weighs_input
            """Whether routing weights multiply the inputs of experts."""
            unit = gated_unit(options)
            self._hidden = jax.jit(partial(hidden, unit=unit, project=multiply))

    def expert_hidden(
        self, x_UD: np.ndarray, gate_up_PDF: np.ndarray, bias_PF: np.ndarray | None
    ) -> np.ndarray:
        """The input `[U, F]` of one expert's weight `down`, for the rows of its tokens."""
        h_UF = np.empty((len(x_UD), gate_up_PDF.shape[-1]), np.float32)
        weight, bias = jnp.asarray(gate_up_PDF), None if bias_PF is None else jnp.asarray(bias_PF)
        for start in range(0, len(x_UD), _TILE):
            x_WD = x_UD[start : start + _TILE]
            padded_WD = np.pad(x_WD, ((0, _TILE - len(x_WD)), (0, 0)))
            h_WF = self._hidden(padded_WD, weight, bias)
            h_UF[start : start + _TILE] = np.asarray(h_WF)[: len(x_WD)]
        return h_UF

    def _trace_input_sum(
        self,
        parameters: Mapping[str, jax.Array],
        x_BTD: jax.Array,
        true_length_B: jax.Array,
        parameter: str,
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
        decoder = self._bind(parameters)
        (weight,) = (
            i for i, name in parameter_names(decoder.layers[0]).items() if name == parameter
        )
        is_token_BT = jnp.arange(x_BTD.shape[1])[None] < true_length_B[:, None]
        equation = "MA,MA->A" if is_diagonal else "MA,MX->AX"
        operations = _InputSum(weight, is_token_BT, equation)
        decoder.operations = operations
        _run_whole(decoder, x_BTD, true_length_B)
        assert operations.sum is not None, parameter
        return operations.sum

    def _trace_expert_input(
        self, parameters: Mapping[str, jax.Array], x_BTD: jax.Array, true_length_B: jax.Array
    ) -> ExpertInput:
        decoder = self._bind(parameters)
        operations = _ExpertInput()
        decoder.operations = operations
        _run_whole(decoder, x_BTD, true_length_B)
        return operations.input

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


def _run_whole(decoder: Decoder, x_BTD: jax.Array, true_length_B: jax.Array) -> jax.Array:
    """The residual stream after all layers of a decoder, for right-padded whole prompts."""
    call = decoder.whole_prompts(x_BTD.shape[:2], true_length_B)
    return decoder.run_layers(x_BTD, call)[0]
