"""Weights as codes with scales, and the products of activations with them.

A product of a weight without groups converts the codes alone, and applies the scales to its result
or to its activations. XLA for TPU and GPU converts codes within the product, while XLA for CPU
writes converted codes to memory. A weight in groups is dequantised before its product. XLA may then
write its values to memory, so products of few rows have two other forms:

- On TPU, codes are multiplied in a batch of products, one for each group, and scales multiply the
  results of the groups. For more rows than a group has members, these results would be more numbers
  than the weight, and take longer than dequantising it. A slice of larger arrays is dequantised,
  but its offsets are multiplied with sums of activations.
- On GPU, values are float32, and the product rounds them. XLA then dequantises within the product,
  if an option of the compiler allows it.

A product may round its activations to int8, too, with one scale for all features of a token that it
sums over. Then it multiplies integers, sums them as int32, and both scales multiply its result.

`weight_formats` describes groups and scales. Knows nothing of layouts or files, and does not choose
codes.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from .packed_products import Rows, multiply_panels
from .packed_weight import PackedWeight
from .product import Labels, Product
from .weight_formats import Quantisation

_Value = TypeVar("_Value")

_LEADING = "abcd"
"""Dimension letters of leading axes that an equation leaves out."""
_GROUP, _MEMBER = "g", "k"
"""Dimension letters of the groups of a weight, and of the input features of a group."""
_LARGEST_INT8 = 127
_FEW_ROWS_ON_GPU = 512
"""The most rows whose product takes no longer than writing the values of the weight, and reading
them again, on an H100."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class QuantisedWeight:
    """A weight in codes, or a part of one."""

    codes: jax.Array | PackedWeight
    """Integers or small floats, with the axes of the weight. Those that a product multiplies with
    codes may be in panels."""
    scales: jax.Array
    """The factors of the codes."""
    quantisation: Quantisation = field(metadata={"static": True})
    offsets: jax.Array | None = None
    """The numbers to add to all codes of a group times its scale; None for zeros."""
    order: jax.Array | None = None
    """The input feature of each position of the codes; None if codes are in order of inputs."""
    dtype: jnp.dtype | None = field(default=None, metadata={"static": True})
    """The dtype of weights that are not quantised; None for that of the scales."""
    is_slice: bool = field(default=False, metadata={"static": True})
    """Whether the program takes the arrays out of larger ones, as those of a scanned layer."""

    @property
    def array(self) -> jax.Array:
        """The codes, which are not in panels."""
        assert not isinstance(self.codes, PackedWeight), "these codes are in panels"
        return self.codes

    @property
    def value_dtype(self) -> jnp.dtype:
        """The dtype of weights that are not quantised."""
        return self.dtype or self.scales.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.codes.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the weight."""
        return self.codes.ndim

    @property
    def num_groups(self) -> int:
        """The number of groups; 1 if all input features share a scale."""
        return self.scales.shape[self.quantisation.inputs[-1]]

    def __getitem__(self, index: Any) -> "QuantisedWeight":
        """The weight itself at `...`, or a part at an index of axes before the inputs."""
        return self if index is ... else jax.tree.map(lambda x: x[index], self)

    def grouped_codes(self) -> jax.Array:
        """The codes, with groups and their members as two axes in place of the inputs."""
        shape = self.quantisation.replace_inputs(self.shape, self.num_groups, -1)
        return self.array.reshape(shape)

    def dequantise(self) -> jax.Array:
        """The weight as an array, rounded once to the dtype of weights that are not quantised.

        Its input features are in the order of the codes.
        """
        values = self.grouped_codes().astype(jnp.float32) * self._by_member(self.scales)
        if self.offsets is not None:
            values = values + self._by_member(self.offsets)
        return values.astype(self.value_dtype).reshape(self.shape)

    def _by_member(self, of_groups: jax.Array) -> jax.Array:
        """Float32 numbers of groups, with an axis of size one for the members of groups."""
        return jnp.expand_dims(of_groups.astype(jnp.float32), self.quantisation.inputs[-1])


def map_arrays(
    function: Callable[[Any, tuple[_Value, ...]], Any],
    weight: Any,
    of_axes: tuple[_Value, ...],
    shared: _Value,
) -> Any:
    """Apply a function to the array of a weight, or to all arrays of a quantised weight.

    Args:
      function: A function of an array and of one value for each of its axes.
      weight: The weight.
      of_axes: The values of the axes of the weight.
      shared: See `Quantisation.of_scales`.
    """
    if not isinstance(weight, QuantisedWeight):
        return function(weight, of_axes)
    of_scales = weight.quantisation.of_scales(of_axes, shared)
    scales, offsets = (
        None if array is None else function(array, of_scales)
        for array in (weight.scales, weight.offsets)
    )
    order = None if weight.order is None else function(weight.order, (shared,))
    codes = function(weight.codes, of_axes)
    return replace(weight, codes=codes, scales=scales, offsets=offsets, order=order)


def take_rows(table: jax.Array | QuantisedWeight | PackedWeight, ids: jax.Array) -> jax.Array:
    """Rows of a table whose last axis is its inputs; an id out of range is clipped."""

    def take(x: Any) -> jax.Array:
        return x.take(ids) if isinstance(x, PackedWeight) else x.at[ids].get(mode="clip")

    rows = jax.tree.map(take, table, is_leaf=lambda x: isinstance(x, PackedWeight))
    return rows.dequantise() if isinstance(rows, QuantisedWeight) else rows


def slice_weight(weight: jax.Array | QuantisedWeight, starts: list[Any], sizes: list[int]) -> Any:
    """A slice of a weight by `dynamic_slice`, with whole groups of its only input axis."""
    if not isinstance(weight, QuantisedWeight):
        return jax.lax.dynamic_slice(weight, starts, sizes)
    quantisation, ranges = weight.quantisation, tuple(zip(starts, sizes, strict=True))
    assert weight.order is None, "slices have the order of the weight"
    (axis,), groups = quantisation.inputs, (0, 1)
    if group := quantisation.format.group:
        groups = starts[axis] // group, sizes[axis] // group
    of_scales = quantisation.replace_inputs(ranges, groups)
    codes, scales, offsets = (
        None if array is None else jax.lax.dynamic_slice(array, *zip(*of_axes, strict=True))
        for array, of_axes in (
            (weight.array, ranges),
            (weight.scales, of_scales),
            (weight.offsets, of_scales),
        )
    )
    return replace(weight, codes=codes, scales=scales, offsets=offsets, is_slice=True)


def as_slices(weights: _Value) -> _Value:
    """The weights of a tree, marked as slices if they are quantised."""

    def mark(x: Any) -> Any:
        return replace(x, is_slice=True) if isinstance(x, QuantisedWeight) else x

    return jax.tree.map(mark, weights, is_leaf=lambda x: isinstance(x, QuantisedWeight))


def multiply_codes(
    product: Product,
    x: jax.Array,
    weight: QuantisedWeight,
    max_over_parts: Callable[[jax.Array], jax.Array] = lambda x: x,
    rows: Rows | None = None,
) -> jax.Array:
    """Multiply activations with a quantised weight.

    Args:
      product: The product of activations and codes, or values.
      x: Activations; they may have more leading axes than the equation.
      weight: The weight.
      max_over_parts: The maximum over the parts of tokens, if devices have only parts of the
        features that the product sums over. All parts of a token have the same scale.
      rows: The rows to compute, if the codes are in panels; see `multiply_panels`.

    Returns:
      The product in float32.
    """
    x_labels, labels, out_labels = product.labels
    leading = _LEADING[: x.ndim - len(x_labels)]
    x_labels, out_labels = leading + x_labels, leading + out_labels
    if weight.order is not None:
        inputs = "".join(labels[axis] for axis in weight.quantisation.inputs)
        x = _take_flat(x, weight.order, x_labels.index(inputs), len(inputs))
    if weight.num_groups > 1 or weight.offsets is not None:
        return _multiply_in_groups(Labels(x_labels, labels, out_labels), product, x, weight)
    labels = "".join(weight.quantisation.replace_inputs(tuple(labels)))
    scales, of_result = weight.scales.squeeze(weight.quantisation.inputs[-1]), 1
    if set(labels) <= set(out_labels):
        of_result = _align(scales, labels, out_labels)
    else:
        # the product sums over an axis of the scales, so they multiply the activations
        x = (x * _align(scales, labels, x_labels)).astype(x.dtype)
    if not weight.quantisation.rounds_activations:
        return product(x, weight.array.astype(x.dtype)) * of_result
    summed = [axis for axis, label in enumerate(x_labels) if label not in out_labels]
    x_codes, x_scale = _round_activations(x, summed, max_over_parts)
    kept = "".join(label for label in x_labels if label in out_labels)
    x_scale = _align(x_scale.squeeze(summed), kept, out_labels)
    if isinstance(weight.codes, PackedWeight):
        out = multiply_panels(product, x_codes, weight.codes, jnp.dtype(jnp.int32), rows)
    else:
        out = product(x_codes, weight.codes)
    return out.astype(jnp.float32) * x_scale * of_result


def _multiply_in_groups(
    labels: Labels, product: Product, x: jax.Array, weight: QuantisedWeight
) -> jax.Array:
    """Multiply activations with a weight in groups, in the best form for the platform and rows."""

    def multiply_values(x: jax.Array, weight: QuantisedWeight) -> jax.Array:
        return product(x, weight.dequantise())

    is_summed = not any(labels.weight[axis] in labels.out for axis in weight.quantisation.inputs)
    sizes = dict(zip(labels.x, x.shape, strict=True))
    rows = math.prod(sizes[label] for label in labels.out if label not in labels.weight)
    forms = {}
    has_few_sums = rows * weight.num_groups <= weight.quantisation.num_inputs(weight.shape)
    if has_few_sums and is_summed:
        # XLA for TPU would copy the codes of a slice, but dequantises them as it slices
        if not weight.is_slice:
            forms["tpu"] = partial(multiply_by_group, labels)
        elif weight.offsets is not None:
            forms["tpu"] = partial(multiply_without_offsets, labels, product)
    is_bfloat16 = x.dtype == weight.value_dtype == jnp.bfloat16
    if rows <= _FEW_ROWS_ON_GPU and is_bfloat16 and (is_summed or weight.offsets is None):
        forms["cuda"] = partial(multiply_on_gpu, labels, product)
    return jax.lax.platform_dependent(x, weight, default=multiply_values, **forms)


def multiply_without_offsets(
    labels: Labels, product: Product, x: jax.Array, weight: QuantisedWeight
) -> jax.Array:
    """Multiply a few rows with a slice of a weight in groups with offsets.

    Offsets are not added to the values: they are multiplied with sums of the activations. XLA for
    TPU would otherwise write the scales and offsets of a slice as float32, and read them again.

    The arguments are those of `multiply_on_gpu`.
    """
    # codes around zero, as their values are rounded without the offsets
    weight = _with_convertible_codes(weight)
    out = product(x, replace(weight, offsets=None).dequantise())
    return _add_offsets(out, labels, x, weight)


def multiply_on_gpu(
    labels: Labels, product: Product, x: jax.Array, weight: QuantisedWeight
) -> jax.Array:
    """Multiply a few rows of bfloat16 activations with a weight in groups, or with offsets.

    The values of the weight are float32, and the product rounds them to bfloat16. XLA for GPU
    computes these values within the product only if no step converts them to a narrower dtype.
    Offsets are not added to the values: they are multiplied with sums of the activations.

    Args:
      labels: The labels of the product, which sums over all inputs of the weight.
      product: The product of activations and values.
      x: Activations.
      weight: The weight.

    Returns:
      The product in float32.
    """
    weight = _with_convertible_codes(weight)
    if weight.num_groups == 1:
        return multiply_by_group(labels, x, weight)
    values = replace(weight, offsets=None, dtype=jnp.dtype("float32")).dequantise()
    with jax.default_matmul_precision("BF16_BF16_F32"):
        out = product(x.astype(jnp.float32), values)
    return _add_offsets(out, labels, x, weight)


def _with_convertible_codes(weight: QuantisedWeight) -> QuantisedWeight:
    """The same weight, with codes that XLA for GPU converts within a product.

    It does not convert uint4 and float4 there, so these are written as int4 and float8.
    """
    if weight.codes.dtype == jnp.float4_e2m1fn:
        # without the barrier, XLA would write float32
        codes = jax.lax.optimization_barrier(weight.array.astype(jnp.float8_e4m3fn))
        return replace(weight, codes=codes)
    if weight.codes.dtype != jnp.uint4:
        return weight
    center = 8
    codes = jax.lax.bitcast_convert_type(weight.array ^ jnp.uint4(center), jnp.int4)
    offsets = weight.scales.astype(jnp.float32) * center
    if weight.offsets is not None:
        offsets = offsets + weight.offsets
    return replace(weight, codes=codes, offsets=offsets)


def multiply_by_group(labels: Labels, x: jax.Array, weight: QuantisedWeight) -> jax.Array:
    """Multiply activations with a weight in groups, as a batch of products: one for each group.

    The arguments are those of `multiply_on_gpu`.
    """
    quantisation, codes = weight.quantisation, weight.grouped_codes().astype(x.dtype)
    member_labels = "".join(quantisation.replace_inputs(tuple(labels.weight), _GROUP, _MEMBER))
    grouped_labels, grouped_x = _group(labels, x, weight)
    of_groups = _GROUP + labels.out
    out = _einsum(f"{grouped_labels},{member_labels}->{of_groups}", grouped_x, codes)
    scale_labels = "".join(quantisation.replace_inputs(tuple(labels.weight), _GROUP))
    out = (out * _align(weight.scales, scale_labels, of_groups)).sum(axis=0)
    return _add_offsets(out, labels, x, weight)


def _group(labels: Labels, x: jax.Array, weight: QuantisedWeight) -> tuple[str, jax.Array]:
    """Activations and their labels, with groups and their members in place of the inputs."""
    inputs = "".join(labels.weight[axis] for axis in weight.quantisation.inputs)
    start, num_groups = labels.x.index(inputs), weight.num_groups
    members = weight.quantisation.num_inputs(weight.shape) // num_groups
    grouped = x.reshape(*x.shape[:start], num_groups, members, *x.shape[start + len(inputs) :])
    return labels.x.replace(inputs, _GROUP + _MEMBER), grouped


def _add_offsets(
    out: jax.Array, labels: Labels, x: jax.Array, weight: QuantisedWeight
) -> jax.Array:
    """Add the products of the offsets of groups with the sums of their activations."""
    if weight.offsets is None:
        return out
    grouped_labels, grouped_x = _group(labels, x, weight)
    sums = grouped_x.astype(jnp.float32).sum(axis=grouped_labels.index(_MEMBER))
    scale_labels = "".join(weight.quantisation.replace_inputs(tuple(labels.weight), _GROUP))
    equation = f"{grouped_labels.replace(_MEMBER, '')},{scale_labels}->{labels.out}"
    return out + _einsum(equation, sums, weight.offsets)


def _einsum(equation: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.einsum(equation, x, weight, preferred_element_type=jnp.float32)


def _round_activations(
    x: jax.Array, summed: Sequence[int], max_over_parts: Callable[[jax.Array], jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Activations as int8 codes, and one scale for all features along the axes `summed`."""
    x = x.astype(jnp.float32)
    scale = max_over_parts(jnp.abs(x).max(summed, keepdims=True)) * (1 / _LARGEST_INT8)
    # a scale that is not finite makes the result so, whatever the codes are
    return jnp.rint(x / jnp.where(scale > 0, scale, 1)).astype(jnp.int8), scale


def _take_flat(x: jax.Array, order: jax.Array, start: int, num_axes: int) -> jax.Array:
    """Take entries of some adjacent axes, which count as one axis."""
    flat = x.reshape(*x.shape[:start], -1, *x.shape[start + num_axes :])
    return jnp.take(flat, order, axis=start).reshape(x.shape)


def _align(scales: jax.Array, labels: str, of_array: str) -> jax.Array:
    """Float32 scales in the order of an array's axes, with axes of size one for all other axes."""
    order = sorted(range(len(labels)), key=lambda axis: of_array.index(labels[axis]))
    sizes = dict(zip(labels, scales.shape, strict=True))
    shape = [sizes.get(label, 1) for label in of_array]
    return scales.astype(jnp.float32).transpose(order).reshape(shape)
