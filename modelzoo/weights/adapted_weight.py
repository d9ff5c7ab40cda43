"""Weights with the matrices of several adapters, one of which each row of a call may use.

The matrices of all adapters lie side by side, R = adapters times rank. Activations are multiplied
with all of them in one product. Of the result, each row keeps the part of its own adapter, and the
other parts become zeros. A row without an adapter keeps the bits of the product with the weight
alone. So the bits of a row depend neither on the adapters of its neighbours nor on their place in
the call.

Source: Hu et al. 2021, "LoRA" (2106.09685). Knows nothing of layouts or files.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .product import Labels, Product
from .weight_formats import replace_axes
from .weight_products import Axes, Project, axes_of

if TYPE_CHECKING:
    from .packed_weight import PackedWeight
    from .quantised_weight import QuantisedWeight
    from .weight_products import Weight

NO_ADAPTER = 0
"""The number of rows without an adapter; the adapters are numbered from 1."""
_RANKS, _ROWS = "R", "B"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedWeight:
    """A weight, and the matrices of adapters for it."""

    base: "jax.Array | QuantisedWeight | PackedWeight"
    down: jax.Array
    """The axes of the input features of the weight, then R: from inputs to ranks."""
    up: jax.Array
    """The axes of the weight, with R in place of its input features: from ranks to outputs."""
    count: int = field(metadata={"static": True})
    """The number of adapters."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.base.shape

    @property
    def ndim(self) -> int:
        """The number of axes of the weight."""
        return len(self.base.shape)

    def __getitem__(self, index: Any) -> "AdaptedWeight":
        """The weight itself at `...`, or a part at an index of axes before the inputs."""
        return self if index is ... else jax.tree.map(lambda x: x[index], self)


def down_shape(shape: tuple[int, ...], inputs: tuple[int, ...], size: int) -> tuple[int, ...]:
    """The shape of `AdaptedWeight.down`, without axes of layers.

    Args:
      shape: The shape of the weight.
      inputs: The axes of its input features, counted from the end.
      size: R.
    """
    return (*_inputs_of(shape, inputs), size)


def down_axes(logical_axes: Axes, inputs: tuple[int, ...]) -> Axes:
    """The logical axes of `AdaptedWeight.down`."""
    return (*_inputs_of(logical_axes, inputs), "")


def _inputs_of(of_axes: Any, inputs: tuple[int, ...]) -> Any:
    return tuple(of_axes[axis] for axis in inputs)


def base_of(weight: "Weight") -> Any:
    """The parameter of an adapted weight without its adapters."""
    return _part(weight, _value_of(weight).base, axes_of(weight))


def multiply_adapters(
    project: Project,
    product: Product,
    x: jax.Array,
    weight: "Weight",
    adapter_B: jax.Array,
    x_axes: Axes,
    out_axes: Axes,
) -> jax.Array:
    """Multiply activations with the adapters of an adapted weight.

    Args:
      project: `Operations.project`, for products with weights that are not adapted.
      product: The product of activations and the weight, with `B` as rows.
      x: Activations.
      weight: The parameter with an `AdaptedWeight`.
      adapter_B: The number of each row's adapter.
      x_axes: The logical axes of `x`.
      out_axes: The logical axes of the result.

    Returns:
      The term that the adapters add to the product with the weight, in float32.
    """
    x_labels, _, out_labels = product.labels
    (first_labels, first), (second_labels, second) = _steps(product, weight)
    summed = set(first_labels) & set(x_labels) - set(out_labels)
    ranks_labels = "".join(label for label in x_labels if label not in summed) + _RANKS
    axis_of = dict(zip(out_labels, out_axes, strict=bool(out_axes)))
    ranks_axes = tuple(axis_of.get(label, "") for label in ranks_labels) if out_axes else ()
    to_ranks = _flat_einsum(Labels(x_labels, first_labels, ranks_labels))
    ranks = project(to_ranks, x, first, x_axes, ranks_axes)
    is_own = _is_own(adapter_B, ranks.shape, ranks_labels, _value_of(weight).count)
    from_ranks = _flat_einsum(Labels(ranks_labels, second_labels, out_labels))
    return project(
        from_ranks, jnp.where(is_own, ranks, 0), second, ranks_axes, out_axes, jnp.float32
    )


def add_change(
    out: jax.Array, change: jax.Array, adapter_B: jax.Array, product: Product
) -> jax.Array:
    """The result of a product, with the change of rows that have an adapter."""
    has_adapter = _along(adapter_B != NO_ADAPTER, out.ndim, product.labels.out.index(_ROWS))
    return jnp.where(has_adapter, (out.astype(jnp.float32) + change).astype(out.dtype), out)


def _steps(product: Product, weight: "Weight") -> list[tuple[str, Any]]:
    """The labels and the parameters of the two products of an adapter, in their order."""
    value, declared, labels = _value_of(weight), axes_of(weight), product.labels
    inputs = weight.get_metadata()["inputs"]  # pyright: ignore[reportAttributeAccessIssue]
    down_labels = "".join(_inputs_of(labels.weight, inputs)) + _RANKS
    up_labels = "".join(replace_axes(tuple(labels.weight), inputs, _RANKS))
    steps = [
        (down_labels, _part(weight, value.down, down_axes(declared, inputs))),
        (up_labels, _part(weight, value.up, replace_axes(declared, inputs, ""))),
    ]
    # a product may sum over outputs of the weight, as absorbed attention does
    return steps if set(down_labels) - {_RANKS} <= set(labels.x) else steps[::-1]


def _value_of(weight: "Weight") -> AdaptedWeight:
    value = weight[...]
    assert isinstance(value, AdaptedWeight), "the caller has found an adapted weight"
    return value


def _part(weight: "Weight", value: Any, logical_axes: Axes) -> Any:
    """A parameter like `weight` with a part of its value."""
    return weight.copy(value, logical_axes=logical_axes)  # pyright: ignore


def _is_own(
    adapter_B: jax.Array, shape: tuple[int, ...], labels: str, num_adapters: int
) -> jax.Array:
    """Whether a rank is one of the row's own adapter; axes but rows and ranks have size one."""
    number_R = jnp.arange(shape[-1]) // (shape[-1] // num_adapters) + NO_ADAPTER + 1
    own_B = _along(adapter_B, len(labels), labels.index(_ROWS))
    return own_B == _along(number_R, len(labels), len(labels) - 1)


def _along(x: jax.Array, ndim: int, axis: int) -> jax.Array:
    """A vector along one axis of an array, with axes of size one around it."""
    return x.reshape((1,) * axis + (-1,) + (1,) * (ndim - axis - 1))


def _flat_einsum(labels: Labels) -> Product:
    """An einsum in float32, with several summed axes at the end of `x` as one.

    With three axes, XLA copies the weights in every call.
    """
    equation = f"{labels.x},{labels.weight}->{labels.out}"
    summed = [label for label in labels.x if label not in labels.out]
    num_summed, is_flat = len(summed), False
    if num_summed > 1:
        end = "".join(summed)
        is_flat = labels.x.endswith(end) and labels.weight.startswith(end)

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        if not is_flat:
            return jnp.einsum(equation, x, weight, preferred_element_type=jnp.float32)
        x = x.reshape(*x.shape[:-num_summed], -1)
        weight = weight.reshape(-1, *weight.shape[num_summed:])
        return jnp.tensordot(x, weight, 1, preferred_element_type=jnp.float32)

    return Product(equation, product)
