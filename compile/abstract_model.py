"""The bridge from the NNX modules to pure functions of flat parameter dictionaries.

Executables take `{"layers.0.attention.qkv": array, ...}`. NNX is used to define and trace the
model, and not in the hot path. Knows nothing of buckets or devices.
"""

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import jax
from flax import nnx

from ..modelzoo.attention.attend import Attend
from ..modelzoo.attention.blockwise import attend_blockwise
from ..modelzoo.attention.paged import PageReader
from ..modelzoo.cache.state_spec import array_bytes
from ..modelzoo.config import AS_PUBLISHED, Arrangement, DecoderConfig
from ..modelzoo.decoder import Decoder
from ..modelzoo.errors import UserError
from ..modelzoo.layer_groups import block_layers, layers_name, single_layer_names
from ..modelzoo.moe_config import LOSSLESS, Dispatch
from ..modelzoo.operations import ON_ONE_DEVICE, Operations
from ..modelzoo.weights.adapted_weight import AdaptedWeight, down_axes, down_shape
from ..modelzoo.weights.packed_weight import PackedWeight, can_pack, pack
from ..modelzoo.weights.quantised_weight import QuantisedWeight
from ..modelzoo.weights.weight_formats import BYTE_DTYPES, OFFSETS, ORDER, SCALES, replace_axes
from ..modelzoo.weights.weight_products import Axes
from ..sharding.legality import ModelSizes
from .grids.adapter_grid import AdapterGrid
from .grids.bucket_grid import BucketGrid
from .weight_rules import ALL_FLOAT, WeightRules

DOWN, UP = ".adapters.down", ".adapters.up"
"""The ends of the paths of the matrices of adapters, after the path of the weight."""
_IN_RUN_DTYPE = ("final_norm.scale", "inputs.norm.scale")
"""Parameters that always have the dtype of weights that are not quantised.

Every model has at least one of them.
"""


def model_sizes(
    config: DecoderConfig,
    num_devices: int,
    grid: BucketGrid | None = None,
    weight_rules: WeightRules = ALL_FLOAT,
) -> ModelSizes:
    """Sizes that a layout of this model is checked against, with the shapes of a grid if given."""
    weights, groups = _published_weights(config, weight_rules)
    if grid is None:
        return ModelSizes(config, num_devices, weights, lengths={"decode": (1,)}, groups=groups)
    batches = {"prefill": [b.batch for b in grid.prefill], "decode": [grid.decode_slots]}
    lengths = {"prefill": [b.tokens for b in grid.prefill], "decode": [1]}
    return ModelSizes(
        config,
        num_devices,
        weights,
        batches,
        lengths,
        grid.page,
        (grid.slot_groups or 1) if grid.decode_slots else None,
        bool(grid.chunks),
        groups,
    )


@cache
def _published_weights(
    config: DecoderConfig, weight_rules: WeightRules
) -> tuple[Mapping[str, tuple[tuple[int, ...], Axes]], Mapping[str, tuple[int, str]]]:
    """Shape and logical axes of every parameter, and `ModelSizes.groups`.

    Cached, because they need a trace of the model.
    """
    model = AbstractModel(config, weight_rules=weight_rules)
    shapes = model.abstract_parameters("float32")
    weights = {name: (shapes[name].shape, a) for name, a in model.logical_axes().items()}
    groups = {}
    for name, quantisation in model.quantisations.items():
        if quantisation.format.group:
            (num_groups, *_), (logical_axis, *_) = (
                of_axes[quantisation.inputs[-1] :] for of_axes in weights[name + SCALES]
            )
            # if the inputs are reordered, any range of them may have features of all groups
            groups[name] = 1 if quantisation.format.is_ordered else num_groups, logical_axis
    return weights, groups


class AbstractModel:
    """The structure of a decoder: its abstract parameters, and the module bound to real ones.

    The codes of a quantised weight have the name of the weight. Its scales are a parameter of their
    own, `layers.0.mlp.down.scales`, and so are its offsets and its order if it has any, and the
    matrices of adapters for it.
    """

    def __init__(
        self,
        config: DecoderConfig,
        arrangement: Arrangement = AS_PUBLISHED,
        weight_rules: WeightRules = ALL_FLOAT,
        adapters: AdapterGrid | None = None,
    ):
        """Define a decoder, with room for adapters if it is given.

        Raises:
          ValueError: A weight cannot have the format that `weight_rules` has for it, or no weight
            can have adapters that `adapters` has room for.
        """
        self.config = config
        self.arrangement = arrangement
        module = nnx.eval_shape(lambda: Decoder(config, rngs=_OneKey(0), arrangement=arrangement))
        self._graphdef, state = nnx.split(module)
        self._variables = {
            self._name(*path): (path, variable) for path, variable in nnx.to_flat_state(state)
        }
        self.weight_rules = weight_rules
        self.weights: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
            name: (variable.get_value().shape, variable.get_metadata().get("inputs"))
            for name, (_, variable) in self._variables.items()
        }
        """The shape of each parameter, and its inputs if it is a weight of products."""
        self.quantisations = weight_rules.quantisations(self.weights)
        """The quantisation of each quantised weight, by its dotted path."""
        self.float_weights = tuple(
            name
            for name, (_, variable) in self._variables.items()
            if variable.get_metadata().get("inputs") and name not in self.quantisations
        )
        """The dotted paths of weights of products that are not quantised."""
        self.packed = self._packed()
        """The inputs of each weight that is stored in panels, by its dotted path."""
        self.adapters = adapters
        self.adapted = {} if adapters is None else self._adapted(adapters)
        """The rank of each adapted weight, by its dotted path."""

    def abstract_parameters(self, dtype: jax.typing.DTypeLike) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes of all parameters by dotted path, in the dtype in which they are stored.

        Weights that are not quantised, and scales that are not published, have `dtype`. Some
        parameters have a dtype of their own instead.
        """
        return {
            name: jax.ShapeDtypeStruct(shape, own_dtype or dtype)
            for name, shape, _, own_dtype in self._arrays()
        }

    def element_bytes(self, dtype: jax.typing.DTypeLike) -> dict[str, float]:
        """Average bytes of an element of each parameter, by dotted path of a single layer.

        They include scales, offsets and the matrices of adapters.
        """
        abstract = self.abstract_parameters(dtype)
        average = {}
        for name in self._variables:
            paths = (name, *(name + end for end in (SCALES, OFFSETS, ORDER, DOWN, UP)))
            arrays = [abstract[path] for path in paths if path in abstract]
            num_bytes = sum(array_bytes(x.shape, x.dtype) for x in arrays)
            for single in single_layer_names(name):
                average[single] = num_bytes / math.prod(abstract[name].shape)
        return average

    def integer_products(self) -> frozenset[str]:
        """The weights whose products multiply integers, by dotted path of a single layer.

        Experts are left out: their products do not round activations.
        """
        return frozenset(
            single
            for name, quantisation in self.quantisations.items()
            if quantisation.rounds_activations
            and not self._variables[name][1].get_metadata()["is_sliced_once"]
            for single in single_layer_names(name)
        )

    def logical_axes(self) -> dict[str, tuple[str, ...]]:
        """Logical axes of each parameter by dotted path; a leading layer axis has the name ""."""
        return {name: logical_axes for name, _, logical_axes, _ in self._arrays()}

    def _arrays(self) -> Iterator[tuple[str, tuple[int, ...], tuple[str, ...], Any]]:
        """The dotted path, shape, logical axes and own dtype of each parameter, if it has one."""
        for name, (_, variable) in self._variables.items():
            shape, metadata = variable.get_value().shape, variable.get_metadata()
            layers = shape[: len(shape) - len(metadata["logical_axes"])]
            of_layers = ("",) * len(layers)
            whole = of_layers + metadata["logical_axes"]
            quantisation = self.quantisations.get(name)
            if quantisation is None:
                yield name, shape, whole, metadata.get("kept_dtype")
            else:
                form = quantisation.format
                codes = form.codes if self.arrangement.packs_codes else BYTE_DTYPES[form.codes]
                yield name, shape, whole, codes
                of_scales = quantisation.scale_shape(shape), quantisation.of_scales(whole, "")
                yield name + SCALES, *of_scales, form.scales
                if form.has_offsets:
                    yield name + OFFSETS, *of_scales, "float32"
                if form.is_ordered:
                    order_shape = (*layers, quantisation.num_inputs(shape))
                    yield name + ORDER, order_shape, (*of_layers, ""), "int32"
            if self.adapters is not None and name in self.adapted:
                # the ranks of all adapters are side by side
                size, inputs = self.adapted[name] * self.adapters.count, metadata["inputs"]
                down = (*layers, *down_shape(shape, inputs, size))
                yield name + DOWN, down, of_layers + down_axes(whole, inputs), None
                up = replace_axes(shape, inputs, size)
                yield name + UP, up, replace_axes(whole, inputs, ""), None

    def _name(self, *path: Any) -> str:
        """The dotted path of a parameter, with its layer's number instead of its group index."""
        first, *rest = path
        if first == "layers":
            rest[0] = layers_name(block_layers(self.config, self.arrangement)[rest[0]])
        return ".".join(map(str, (first, *rest)))

    def _packed(self) -> dict[str, tuple[int, ...]]:
        """The inputs of weights that are stored in panels; none if layers are scanned."""
        if self.arrangement.panel_columns is None or self.arrangement.scan_layers:
            return {}
        forms: dict[str, tuple[str, int]] = dict.fromkeys(self.float_weights, ("bfloat16", 1))
        if (lanes := self.arrangement.code_lanes) is not None:
            # products of rounded activations multiply codes with codes
            forms |= {
                name: ("int8", lanes)
                for name, quantisation in self.quantisations.items()
                if quantisation.rounds_activations
            }
        packed = {}
        for name, form in forms.items():
            metadata = self._variables[name][1].get_metadata()
            inputs = metadata["inputs"]
            if metadata["is_matrix"] and can_pack(self.weights[name][0], inputs, *form):
                packed[name] = inputs
        return packed

    def pack(self, parameters: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Loaded parameters in the order in which graphs read them; the arrays are donated."""
        columns = self.arrangement.panel_columns
        change = jax.jit(pack, static_argnums=(1, 2), donate_argnums=0)
        return {
            name: change(array, self.packed[name], columns) if name in self.packed else array
            for name, array in parameters.items()
        }

    def can_adapt(self, name: str) -> bool:
        """Whether rows may use adapters of a parameter: a layer's weight that every token uses.

        Routers, experts, the embedding and the head have no adapters.
        """
        metadata = self._variables[name][1].get_metadata()
        is_matrix = len(metadata["logical_axes"]) > 1 and metadata.get("inputs") is not None
        is_of_layer = name.startswith("layers.") and not name.endswith(".router")
        return is_matrix and is_of_layer and not metadata["is_sliced_once"]

    def _adapted(self, adapters: AdapterGrid) -> dict[str, int]:
        """The rank of each weight that the grid adapts; ValueError if it names other weights."""
        ranks = {name: adapters.rank_of(name) for name in self._variables if self.can_adapt(name)}
        found = {name.partition("layers.")[2].partition(".")[2] for name in ranks}
        if unknown := sorted(adapters.ranks.keys() - found):
            raise UserError(
                f"plan adapters.ranks: expected weights of {', '.join(sorted(found))}, got "
                f"{unknown[0]!r}. Remove it, or plan again for this model."
            )
        return {name: rank for name, rank in ranks.items() if rank}

    def _value(
        self, name: str, parameters: Mapping[str, jax.Array]
    ) -> jax.Array | QuantisedWeight | PackedWeight | AdaptedWeight:
        base = self._base_value(name, parameters)
        if name not in self.adapted or self.adapters is None:
            return base
        count = self.adapters.count
        return AdaptedWeight(base, parameters[name + DOWN], parameters[name + UP], count)

    def _base_value(
        self, name: str, parameters: Mapping[str, jax.Array]
    ) -> jax.Array | QuantisedWeight | PackedWeight:
        quantisation, value = self.quantisations.get(name), parameters[name]
        if name in self.packed:
            columns = self.arrangement.panel_columns
            assert columns is not None, "it has packed weights"
            value = PackedWeight(value, self.packed[name], columns)
        if quantisation is None:
            return value
        return QuantisedWeight(
            value,
            parameters[name + SCALES],
            quantisation,
            parameters.get(name + OFFSETS),
            parameters.get(name + ORDER),
            next(parameters[name] for name in _IN_RUN_DTYPE if name in parameters).dtype,
        )

    @property
    def padded_vocab(self) -> int:
        """Number of columns of the logits."""
        return self.arrangement.padded_vocab or self.config.vocab_size

    def bind(
        self,
        parameters: Mapping[str, jax.Array],
        operations: Operations = ON_ONE_DEVICE,
        dispatch: Dispatch = LOSSLESS,
        attend: Attend | PageReader = attend_blockwise,
    ) -> Decoder:
        """The decoder with these arrays as parameters, for use inside a trace.

        Args:
          parameters: Arrays by dotted path.
          operations: Placement-aware operations of the graph's phase.
          dispatch: Dispatch of experts.
          attend: Attention kernel.
        """
        flat = [
            (path, variable.replace(self._value(name, parameters)))
            for name, (path, variable) in self._variables.items()
        ]
        decoder = nnx.merge(self._graphdef, nnx.from_flat_state(flat))
        decoder.operations = operations
        decoder.dispatch = dispatch
        if isinstance(attend, PageReader):
            decoder.attend_pages = attend.attend
        else:
            decoder.attend = attend
        return decoder


class _OneKey(nnx.Rngs):
    """A single key for all weights, as only their shapes are needed.

    nnx counts keys in a traced array, and on every write it searches all earlier traced values. In
    a deep model that would take longer than the rest of the trace.
    """

    def params(self) -> jax.Array:
        return self.default.key[...]
