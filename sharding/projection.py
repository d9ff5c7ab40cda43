"""The collectives of one product over a mesh: moves before the product, and sums after it.

The labels of an einsum say which dimensions meet. While the product runs, each label is split over
one tuple of mesh axes:

    labels of the weight   as the weight is used; a weight that is split further is gathered first
    other labels           over the mesh axes that the input and the output have in common and that
                           no label of the weight uses; activations are gathered or cut accordingly

The mesh axes of contracted labels hold partial sums. If the result is to be split over some of
them, they are reduce-scattered onto that dimension; the others are all-reduced. Example, `x[B,
D_tensor]`, `w[D, F_tensor]` and a result `[B, F_tensor]`: x is gathered along D, nothing is summed.

Knows nothing of models. Source of the scheme: Pope et al. 2022, "Efficiently Scaling Transformer
Inference", section 3.2, with collectives as in their appendix A.
"""

from dataclasses import dataclass
from functools import cache
from itertools import chain, takewhile
from typing import Any

import jax

from ..modelzoo.weights.product import Labels
from ..modelzoo.weights.quantised_weight import map_arrays
from ..modelzoo.weights.weight_products import Axes
from .axis_rules import AxisRules

MeshAxes = tuple[str, ...]


@dataclass(frozen=True)
class Projection:
    """The collectives of one product; mesh axes by dimension."""

    gather_weight: tuple[MeshAxes, ...]
    gather_x: tuple[MeshAxes, ...]
    cut_x: tuple[MeshAxes, ...]
    partial_split: tuple[MeshAxes, ...]
    """Mesh axes of the result's dimensions while it is a partial sum."""
    scatter: tuple[MeshAxes, ...]
    """Mesh axes of partial sums that are scattered onto each dimension of the result."""
    sum_over: MeshAxes
    """Mesh axes of partial sums that every device gets whole."""
    gather_out: tuple[MeshAxes, ...]
    cut_out: tuple[MeshAxes, ...]

    @classmethod
    def from_rules(
        cls, rules: AxisRules, stored: AxisRules, equation: str, x: Axes, weight: Axes, out: Axes
    ) -> "Projection":
        """Derive the collectives of a product from the rules of a phase and of stored weights."""
        used, weight_stored = rules.dimensions(weight), stored.dimensions(weight)
        return cls.from_mesh_axes(
            equation, rules.dimensions(x), weight_stored, used, rules.dimensions(out)
        )

    @classmethod
    @cache
    def from_mesh_axes(
        cls,
        equation: str,
        x: tuple[MeshAxes, ...],
        weight_stored: tuple[MeshAxes, ...],
        weight_used: tuple[MeshAxes, ...],
        out: tuple[MeshAxes, ...],
    ) -> "Projection":
        """Derive the collectives of a product from the mesh axes of every dimension.

        Args:
          equation: An einsum of activations and a weight, such as `BTD,DF->BTF`.
          x: Mesh axes of the activations.
          weight_stored: Mesh axes of the weight as it is stored.
          weight_used: Mesh axes of the weight in the product; the first ones of `weight_stored`.
          out: Mesh axes of the result.
        """
        x_labels, weight_labels, out_labels = Labels.of(equation)
        x_split = dict(zip(x_labels, x, strict=True))
        out_split = dict(zip(out_labels, out, strict=True))
        weight_split = dict(zip(weight_labels, weight_used, strict=True))
        split = _choose_split(x_split, weight_split, out_split)
        x_used = tuple(split[label] for label in x_labels)
        partial_split = tuple(split[label] for label in out_labels)

        contracted = [label for label in x_labels + weight_labels if label not in out_labels]
        partial_sums = dict.fromkeys(chain.from_iterable(split[label] for label in contracted))
        scatter = tuple(
            _scattered(done, goal, set(partial_sums))
            for done, goal in zip(partial_split, out, strict=True)
        )
        scattered = set(chain.from_iterable(scatter))
        reduced = tuple(a + b for a, b in zip(partial_split, scatter, strict=True))
        return cls(
            gather_weight=tuple(map(extra_axes, weight_stored, weight_used)),
            gather_x=tuple(map(extra_axes, x, x_used)),
            cut_x=tuple(map(extra_axes, x_used, x)),
            partial_split=partial_split,
            scatter=scatter,
            sum_over=tuple(axis for axis in partial_sums if axis not in scattered),
            gather_out=tuple(map(extra_axes, partial_split, out)),
            cut_out=tuple(map(extra_axes, out, reduced)),
        )

    @property
    def mesh_axes(self) -> MeshAxes:
        """Mesh axes that divide the operations of the product among devices."""
        return (*chain(*self.partial_split, *self.scatter), *self.sum_over)

    def max_over_parts(self, x: jax.Array) -> jax.Array:
        """The maximum over the devices whose results are summed; inside `shard_map`."""
        summed = (*chain(*self.scatter), *self.sum_over)
        return jax.lax.pmax(x, summed) if summed else x

    def prepare(self, x: jax.Array, weight: Any) -> tuple[jax.Array, Any]:
        """Gather both operands, and cut the activations, for this device; inside `shard_map`."""
        return self.prepare_x(x), map_arrays(gather, weight, self.gather_weight, shared=())

    def prepare_x(self, x: jax.Array) -> jax.Array:
        """Gather and cut the activations alone."""
        return _cut(gather(x, self.gather_x), self.cut_x)

    def reduce(self, out: jax.Array) -> jax.Array:
        """Turn this device's partial result into its piece of the result."""
        for dimension, mesh_axes in enumerate(self.scatter):
            if mesh_axes:
                out = jax.lax.psum_scatter(out, mesh_axes, scatter_dimension=dimension, tiled=True)
        if self.sum_over:
            out = jax.lax.psum(out, self.sum_over)
        return _cut(gather(out, self.gather_out), self.cut_out)


def gather(x: jax.Array, by_dimension: tuple[MeshAxes, ...]) -> jax.Array:
    """Gather each dimension over its mesh axes; inside `shard_map`."""
    for dimension, mesh_axes in enumerate(by_dimension):
        if mesh_axes:
            x = jax.lax.all_gather(x, mesh_axes, axis=dimension, tiled=True)
    return x


def _cut(x: jax.Array, by_dimension: tuple[MeshAxes, ...]) -> jax.Array:
    for dimension, mesh_axes in enumerate(by_dimension):
        if mesh_axes:
            size = x.shape[dimension] // jax.lax.axis_size(mesh_axes)
            start = jax.lax.axis_index(mesh_axes) * size
            x = jax.lax.dynamic_slice_in_dim(x, start, size, axis=dimension)
    return x


def _choose_split(
    x: dict[str, MeshAxes], weight: dict[str, MeshAxes], out: dict[str, MeshAxes]
) -> dict[str, MeshAxes]:
    """Choose the mesh axes of every label while the product runs.

    The weight decides about its own labels. A label of the activations alone keeps the mesh axes
    that input and output have in common, up to the first one that the weight uses.
    """
    used_by_weight = set(chain.from_iterable(weight.values()))
    split = dict(weight)
    for label, mesh_axes in x.items():
        if label not in split:
            shared = _common(mesh_axes, out[label])
            split[label] = tuple(takewhile(lambda axis: axis not in used_by_weight, shared))
    return split


def _scattered(done: MeshAxes, goal: MeshAxes, partial: set[str]) -> MeshAxes:
    """The mesh axes of partial sums that come next in `goal` after `done`.

    The pieces of a scattered dimension are in the order of `goal` only if major axes split it
    before minor ones.
    """
    if done != goal[: len(done)]:
        return ()
    return tuple(takewhile(partial.__contains__, goal[len(done) :]))


def _common(left: MeshAxes, right: MeshAxes) -> MeshAxes:
    """The longest common prefix."""
    pairs = zip(left, right, strict=False)
    return tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def extra_axes(longer: MeshAxes, shorter: MeshAxes) -> MeshAxes:
    """The mesh axes after the common prefix: those by which `longer` is split further."""
    return longer[len(_common(longer, shorter)) :]
