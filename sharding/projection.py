"""One product over a mesh: what moves before it and what is summed after it.

The labels of an einsum say which dimensions meet. Each label is split, while the product runs, over
one set of mesh axes:

    of the weight          as the weight is used; pieces of it beyond that are gathered first
    of activations only    over the mesh axes that come in and go out alike and that no label of the
                           weight takes; activations are gathered or cut to that

The mesh axes of contracted labels hold partial sums. Those that the result is to be split over next
are reduce-scattered onto that dimension, the others are all-reduced. Example, `x[B, D_tensor]`,
`w[D, F_tensor]` and a result `[B, F_tensor]`: x is gathered along D, nothing is summed.

Knows nothing of models. Source of the scheme: Pope et al. 2022, "Efficiently Scaling Transformer
Inference", section 3.2, with collectives as in their appendix A.
"""

from dataclasses import dataclass
from functools import cache
from itertools import chain, takewhile

import jax

from ..modelzoo.operations import Axes
from .axis_rules import AxisRules

MeshAxes = tuple[str, ...]


@dataclass(frozen=True)
class Projection:
    """The collectives of one product; mesh axes by dimension."""

    gather_weight: tuple[MeshAxes, ...]
    gather_x: tuple[MeshAxes, ...]
    cut_x: tuple[MeshAxes, ...]
    made: tuple[MeshAxes, ...]
    """Of the result while it is partial."""
    scatter: tuple[MeshAxes, ...]
    """Partial sums that end as pieces of this dimension."""
    sum_over: MeshAxes
    """Partial sums that end whole."""
    gather_out: tuple[MeshAxes, ...]
    cut_out: tuple[MeshAxes, ...]

    @classmethod
    def under(
        cls, rules: AxisRules, stored: AxisRules, equation: str, x: Axes, weight: Axes, out: Axes
    ) -> "Projection":
        """The collectives of a product under a phase's rules; the weight lies by `stored`."""
        used, lies = rules.dimensions(weight), stored.dimensions(weight)
        return cls.of(equation, rules.dimensions(x), lies, used, rules.dimensions(out))

    @classmethod
    @cache
    def of(
        cls,
        equation: str,
        x: tuple[MeshAxes, ...],
        weight_stored: tuple[MeshAxes, ...],
        weight_used: tuple[MeshAxes, ...],
        out: tuple[MeshAxes, ...],
    ) -> "Projection":
        """Work out the collectives from the mesh axes of every dimension."""
        inputs, out_labels = equation.split("->")
        x_labels, weight_labels = inputs.split(",")
        split = dict(zip(weight_labels, weight_used, strict=True))
        taken = {axis for mesh_axes in weight_used for axis in mesh_axes}
        goes_out = dict(zip(out_labels, out, strict=True))
        for label, comes_in in zip(x_labels, x, strict=True):
            if label not in split:
                shared = _common(comes_in, goes_out[label])
                split[label] = tuple(takewhile(lambda axis: axis not in taken, shared))
        contracted = [label for label in (x_labels + weight_labels) if label not in out_labels]
        partial = {axis for label in contracted for axis in split[label]}
        ends = [(split[label], goes_out[label]) for label in out_labels]
        scatter = tuple(_scattered(done, goal, partial) for done, goal in ends)
        scattered = {axis for mesh_axes in scatter for axis in mesh_axes}
        return cls(
            gather_weight=tuple(map(beyond, weight_stored, weight_used)),
            gather_x=tuple(beyond(a, split[label]) for label, a in zip(x_labels, x, strict=True)),
            cut_x=tuple(beyond(split[label], a) for label, a in zip(x_labels, x, strict=True)),
            made=tuple(split[label] for label in out_labels),
            scatter=scatter,
            sum_over=tuple(
                dict.fromkeys(
                    axis for label in contracted for axis in split[label] if axis not in scattered
                )
            ),
            gather_out=tuple(beyond(done, goal) for done, goal in ends),
            cut_out=tuple(
                beyond(goal, done + pieces)
                for (done, goal), pieces in zip(ends, scatter, strict=True)
            ),
        )

    @property
    def mesh_axes(self) -> MeshAxes:
        """All that share the product's operations out."""
        return (*chain(*self.made, *self.scatter), *self.sum_over)

    def bring(self, x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Pieces of both operands as this device's product needs them."""
        return self.bring_x(x), gather(weight, self.gather_weight)

    def bring_x(self, x: jax.Array) -> jax.Array:
        """The piece of the activations alone."""
        return _cut(gather(x, self.gather_x), self.cut_x)

    def reduce(self, out: jax.Array) -> jax.Array:
        """This device's piece of the result, from its partial one."""
        for dimension, mesh_axes in enumerate(self.scatter):
            if mesh_axes:
                out = jax.lax.psum_scatter(out, mesh_axes, scatter_dimension=dimension, tiled=True)
        if self.sum_over:
            out = jax.lax.psum(out, self.sum_over)
        return _cut(gather(out, self.gather_out), self.cut_out)


def gather(x: jax.Array, by_dimension: tuple[MeshAxes, ...]) -> jax.Array:
    """Bring together what lies in pieces along the mesh axes of each dimension."""
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


def _scattered(done: MeshAxes, goal: MeshAxes, partial: set[str]) -> MeshAxes:
    """The mesh axes of partial sums that split further what `done` splits, and nothing between.

    Pieces of pieces come in the order of `goal` only if major axes split before minor ones.
    """
    if done != goal[: len(done)]:
        return ()
    return tuple(takewhile(partial.__contains__, goal[len(done) :]))


def _common(left: MeshAxes, right: MeshAxes) -> MeshAxes:
    """The longest common beginning."""
    pairs = zip(left, right, strict=False)
    return tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def beyond(longer: MeshAxes, shorter: MeshAxes) -> MeshAxes:
    """What follows the common beginning: the axes by which one splits further than the other."""
    return longer[len(_common(longer, shorter)) :]
