"""The bridge from the NNX modules to pure functions of flat parameter dictionaries.

Executables take `{"layers.0.attention.qkv": array, ...}`. NNX is used to define and trace the
model, and not in the hot path. Knows nothing of buckets or devices.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import jax
from flax import nnx

from ..modelzoo.attention import Attend
from ..modelzoo.blockwise import attend_blockwise
from ..modelzoo.config import AS_PUBLISHED, Arrangement, DecoderConfig
from ..modelzoo.decoder import Decoder
from ..modelzoo.layer_groups import block_layers, layers_name
from ..modelzoo.moe.config import LOSSLESS, Dispatch
from ..modelzoo.operations import ON_ONE_DEVICE, Operations
from ..modelzoo.weight_products import Axes
from ..sharding.legality import ModelSizes
from .grids.bucket_grid import BucketGrid


def model_sizes(
    config: DecoderConfig, num_devices: int, grid: BucketGrid | None = None
) -> ModelSizes:
    """Sizes that a layout of this model is checked against, with the shapes of a grid if given."""
    weights = _published_weights(config)
    if grid is None:
        return ModelSizes(config, num_devices, weights, lengths={"decode": (1,)})
    batches = {"prefill": [b.batch for b in grid.prefill], "decode": [grid.decode_slots]}
    lengths = {"prefill": [b.tokens for b in grid.prefill], "decode": [1]}
    spans = list(grid.decode_spans)
    if (prefixes := grid.prefixes) is not None:
        batches["prefill"].append(prefixes.batch)
        batches["decode"].append(prefixes.groups)
        lengths["prefill"].append(prefixes.chunk)
        spans.append(prefixes.length)
    return ModelSizes(
        config,
        num_devices,
        weights,
        batches,
        lengths,
        spans,
        grid.slot_groups,
        bool(grid.chunks),
        prefixes is not None,
    )


@cache
def _published_weights(config: DecoderConfig) -> Mapping[str, tuple[tuple[int, ...], Axes]]:
    """Shape and logical axes of every parameter; cached, because they need a trace of the model."""
    model = AbstractModel(config)
    shapes = model.abstract_parameters("float32")
    return {name: (shapes[name].shape, a) for name, a in model.logical_axes().items()}


class AbstractModel:
    """The structure of a decoder: its abstract parameters, and the module bound to real ones."""

    def __init__(self, config: DecoderConfig, arrangement: Arrangement = AS_PUBLISHED):
        self.config = config
        self.arrangement = arrangement
        module = nnx.eval_shape(lambda: Decoder(config, rngs=_OneKey(0), arrangement=arrangement))
        self._graphdef, state = nnx.split(module)
        self._variables = {
            self._name(*path): (path, variable) for path, variable in nnx.to_flat_state(state)
        }

    def abstract_parameters(self, dtype: jax.typing.DTypeLike) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of all parameters by dotted path, in the dtype in which weights are stored.

        Some parameters have a dtype of their own instead.
        """
        return {
            name: jax.ShapeDtypeStruct(
                variable.get_value().shape, variable.get_metadata().get("kept_dtype") or dtype
            )
            for name, (_, variable) in self._variables.items()
        }

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of each parameter by dotted path; a leading layer axis has the name ""."""
        declared = {
            name: (variable.get_value().ndim, variable.get_metadata()["logical_axes"])
            for name, (_, variable) in self._variables.items()
        }
        return {name: ("",) * (ndim - len(axes)) + axes for name, (ndim, axes) in declared.items()}

    def _name(self, *path: Any) -> str:
        """The dotted path of a parameter, with its layer's number instead of its group index."""
        first, *rest = path
        if first == "layers":
            rest[0] = layers_name(block_layers(self.config, self.arrangement)[rest[0]])
        return ".".join(map(str, (first, *rest)))

    @property
    def padded_vocab(self) -> int:
        """Number of columns of the logits."""
        return self.arrangement.padded_vocab or self.config.vocab_size

    def bind(
        self,
        parameters: Mapping[str, jax.Array],
        operations: Operations = ON_ONE_DEVICE,
        dispatch: Dispatch = LOSSLESS,
        attend: Attend = attend_blockwise,
    ) -> Decoder:
        """The decoder with these arrays as parameters, for use inside a trace.

        Args:
          parameters: Arrays by dotted path.
          operations: Placement-aware operations of the graph's phase.
          dispatch: Dispatch of experts.
          attend: Attention kernel.
        """
        flat = [
            (path, variable.replace(parameters[name]))
            for name, (path, variable) in self._variables.items()
        ]
        decoder = nnx.merge(self._graphdef, nnx.from_flat_state(flat))
        decoder.operations = operations
        decoder.dispatch = dispatch
        decoder.attend = attend
        return decoder


class _OneKey(nnx.Rngs):
    """A single key for all weights, as only their shapes are needed.

    nnx counts keys in a traced array, and on every write it searches all earlier traced values. In
    a deep model that would take longer than the rest of the trace.
    """

    def params(self) -> jax.Array:
        return self.default.key[...]
