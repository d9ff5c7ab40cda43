"""The adapters that the rows of a job may use: their table in a plan, and their arrays.

The matrices of all adapters for a weight are concatenated along the ranks, and padded with zeros to
the ranks of the plan. The scale of an adapter multiplies its matrix to outputs. The axis patterns
by which a parameter is read from published tensors also give its adapter matrices, with ranks in
place of the inputs or the outputs. Knows nothing of requests.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...modelzoo.config import Arrangement
from ...modelzoo.families.mapping import ParameterSource, TensorPart
from ...modelzoo.layer_groups import single_layer_names
from ..checkpoint import ModelFiles
from ..checkpoint.axis_pattern import AxisPattern
from ..checkpoint.tensor_source import Index, TensorInfo, source_of
from ..errors import InvalidAdapter, UserError
from .adapter import Adapter, AdapterWeights, LoraPair, check_shape
from .merged_model import published_spec, published_tensors

if TYPE_CHECKING:
    import jax

    from ...compile.abstract_model import AbstractModel
    from ...compile.grids.adapter_grid import AdapterGrid
    from ...modelzoo.families.family import ModelSpec

_RANKS = "rank"


@dataclass(frozen=True)
class AdapterSet:
    """Adapters by name, for one model."""

    model: ModelFiles
    adapters: Mapping[str, Adapter]

    @classmethod
    def open(cls, model: ModelFiles, paths: Mapping[str, Path]) -> "AdapterSet":
        """Open the folders of some adapters.

        Raises:
          InvalidAdapter: A folder has no adapter, or one that is not implemented.
        """
        return cls(model, {name: Adapter(path) for name, path in paths.items()})

    @property
    def names(self) -> tuple[str, ...]:
        """The names, in the order of the numbers in the arrays."""
        return tuple(self.adapters)

    def fingerprints(self) -> dict[str, str]:
        """The hash of everything in each adapter, by name."""
        return {name: adapter.fingerprint() for name, adapter in self.adapters.items()}

    def grid(self) -> "AdapterGrid":
        """The smallest room that all adapters fit into.

        Raises:
          InvalidAdapter: An adapter changes a weight that rows cannot change one by one.
        """
        from ...compile.grids.adapter_grid import AdapterGrid

        return AdapterGrid(len(self.adapters), dict(sorted(self._ranks.items())))

    def check(self, grid: "AdapterGrid | None") -> None:
        """Check that a plan has room for the adapters.

        Raises:
          ValueError: It has less; the error says how much it needs.
        """
        count, ranks = len(self.adapters), self._ranks
        is_enough = grid is not None and grid.count >= count
        if grid is None or not is_enough or any(grid.ranks.get(k, 0) < r for k, r in ranks.items()):
            needed = ", ".join(f'"{target}" = {rank}' for target, rank in sorted(ranks.items()))
            got = "none" if grid is None else f"{grid.count} of {dict(grid.ranks)}"
            raise UserError(
                f"plan [adapters]: expected room for count = {count}, ranks = {{{needed}}}, got "
                f"{got}. Change the table, or plan again."
            )

    def arrays(
        self, definition: "AbstractModel", name: str, arrangement: Arrangement
    ) -> tuple[np.ndarray, np.ndarray]:
        """The matrices of all adapters for a parameter, from inputs and to outputs, in float32."""
        from ...compile.abstract_model import DOWN, UP

        assert definition.adapters is not None, "the model has room for adapters"
        abstract, rank = definition.abstract_parameters("float32"), definition.adapted[name]
        down, up = (np.zeros(abstract[name + end].shape, np.float32) for end in (DOWN, UP))
        layers = single_layer_names(name)
        _, inputs = definition.weights[name]
        assert inputs is not None, "an adapted parameter is a weight of products"
        sources = {s.parameter: s for s in self._spec.arranged(arrangement).sources}
        for layer, parameter in enumerate(layers):
            whole = ... if len(layers) == 1 else layer
            of_layer = down[whole], up[whole]
            # in place of the inputs, which are counted from the end of the weight
            axis = of_layer[1].ndim + inputs[-1]
            for number, weights in enumerate(self._weights.values()):
                start = number * rank
                for tensor, pair in _pairs_of(sources[parameter], weights):
                    ranks = slice(start, start + pair.rank)
                    _fill(of_layer, sources[parameter], tensor, pair, ranks, axis)
                    start += pair.rank
        return down, up

    def release(self) -> None:
        """Free the numbers of the adapters, which the host needs only until devices have them."""
        self.__dict__.pop("_weights", None)

    @cached_property
    def _spec(self) -> "ModelSpec":
        return published_spec(self.model)

    @cached_property
    def _weights(self) -> dict[str, AdapterWeights]:
        spec, tensors = self._spec, published_tensors(self.model, self._spec)
        return {name: adapter.weights(spec, tensors) for name, adapter in self.adapters.items()}

    @cached_property
    def _ranks(self) -> dict[str, int]:
        """The largest rank of an adapter for each weight of a layer."""
        from ...compile.abstract_model import AbstractModel

        spec, tensors = self._spec, published_tensors(self.model, self._spec)
        definition = AbstractModel(spec.config)
        ranks: dict[str, int] = {}
        for name, weights in self._weights.items():
            path = self.adapters[name].path
            left = {*weights.pairs, *weights.whole}
            for source in filter(lambda s: definition.can_adapt(s.parameter), spec.sources):
                pairs = dict(_pairs_of(source, weights))
                for tensor, pair in pairs.items():
                    _check_pair(path, tensor, pair, tensors.tensors[tensor].shape)
                left -= pairs.keys()
                target = source.parameter.split(".", 2)[2]
                if total := sum(pair.rank for pair in pairs.values()):
                    ranks[target] = max(ranks.get(target, 0), total)
            if left:
                raise InvalidAdapter(
                    f"{path}: expected targets in attention and dense MLPs, got {min(left)!r}, "
                    f"which rows cannot change one by one. Merge the adapter with --merge-adapter."
                )
        return ranks


def _check_pair(path: Path, tensor: str, pair: LoraPair, shape: tuple[int, ...]) -> None:
    if pair.magnitude_O is not None:
        raise InvalidAdapter(
            f"{path}: expected LoRA, as rows have adapters of their own, got DoRA, which scales "
            f"whole weights. Merge the adapter with --merge-adapter."
        )
    check_shape(path, tensor, shape, (len(pair.up_OR), pair.down_RI.shape[1]))


def _pairs_of(source: ParameterSource, weights: AdapterWeights) -> Iterator[tuple[str, LoraPair]]:
    """The published tensors of a parameter that an adapter changes, and its matrices for them."""
    tensors = dict.fromkeys(tensor for part in source.parts for tensor in part.tensors)
    return ((tensor, weights.pairs[tensor]) for tensor in tensors if tensor in weights.pairs)


def _fill(
    arrays: tuple[np.ndarray, np.ndarray],
    source: ParameterSource,
    tensor: str,
    pair: LoraPair,
    ranks: slice,
    axis: int,
) -> None:
    """Write the matrices of one published tensor into those of its parameter.

    Args:
      arrays: The matrices of the parameter, from inputs and to outputs.
      source: The source of the parameter.
      tensor: The published tensor.
      pair: The matrices for it.
      ranks: Their place among the ranks of the parameter.
      axis: The axis of ranks in the matrix to outputs.
    """
    down, up = arrays
    with np.errstate(over="ignore", invalid="ignore"):
        scaled_OR = np.float32(pair.scale) * pair.up_OR
    if not np.isfinite(scaled_OR).all():
        raise InvalidAdapter(
            f"{tensor}: expected finite matrices after they are multiplied with the scale, "
            f"{pair.scale:g}, got others. Take another file of the adapter."
        )
    start = 0
    for part in source.parts:
        pattern, info_source = AxisPattern.of(part), _Matrix(part.tensor, scaled_OR)
        outputs = pattern.join_last()
        if part.tensor == tensor:
            array = outputs.read(source_of(part, info_source), tensor)
            index: list[Any] = [slice(None)] * up.ndim
            if len(source.parts) > 1:
                index[source.concat_axis] = slice(start, start + _size(source, part))
            index[axis] = ranks
            up[tuple(index)] = array
            inputs = _inputs_pattern(pattern)
            down[..., ranks] = inputs.read(_Matrix(tensor, pair.down_RI), tensor)
        start += _size(source, part)


def _size(source: ParameterSource, part: TensorPart) -> int:
    """The size of a part along the axis of concatenation."""
    first, end = part.rows or (0, 0)
    # a name without a given size has the rows of the part
    sizes = dict(part.sizes)
    group = AxisPattern.of(part).target[source.concat_axis]
    return math.prod(sizes.get(name, end - first) for name in group)


def _inputs_pattern(pattern: AxisPattern) -> AxisPattern:
    """The pattern of a matrix of ranks and input features, which are the last published axis."""
    inputs = pattern.source[-1]
    target = tuple(group for group in pattern.target if group and set(group) <= set(inputs))
    sizes = tuple((name, size) for name, size in pattern.sizes if name in inputs)
    return AxisPattern(((_RANKS,), inputs), (*target, (_RANKS,)), sizes)


class _Matrix:
    """A source with one tensor: a matrix in memory."""

    def __init__(self, name: str, matrix: np.ndarray):
        self._matrix = matrix
        self.tensors = {name: TensorInfo(matrix.shape, matrix.dtype, "F32", matrix.nbytes)}

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """Read the matrix or a box of it."""
        return self._matrix[index or ...]


def load_arrays(
    definition: "AbstractModel",
    adapters: AdapterSet | None,
    dtype: "jax.typing.DTypeLike",
    shardings: "Mapping[str, jax.sharding.Sharding]",
) -> "dict[str, jax.Array]":
    """Put the matrices of adapters on the devices, by dotted path; zeros without adapters."""
    import jax

    from ...compile.abstract_model import DOWN, UP

    abstract, arrays = definition.abstract_parameters(dtype), {}
    for name in definition.adapted:
        paths = name + DOWN, name + UP
        host: Any = [np.zeros(abstract[path].shape, np.float32) for path in paths]
        if adapters is not None:
            host = adapters.arrays(definition, name, definition.arrangement)
        for path, array in zip(paths, host, strict=True):
            cast = array.astype(abstract[path].dtype)
            arrays[path] = jax.make_array_from_callback(
                cast.shape, shardings[path], cast.__getitem__
            )
    if adapters is not None:
        adapters.release()
    return arrays
