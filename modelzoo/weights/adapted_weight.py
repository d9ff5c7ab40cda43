"""Weights with the matrices of several adapters, one of which each row of a call may use.

The matrices of all adapters lie side by side, R = adapters times rank. Activations are multiplied
with all of them in one product. Of the result, each row keeps the part of its own adapter, and the
other parts become zeros. A row without an adapter keeps the bits of the product with the weight
alone. So the bits of a row depend neither on the adapters of its neighbours nor on their place in
the call.

Source: Hu et al. 2021, "LoRA" (2106.09685). Knows nothing of layouts or files.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .weight_formats import replace_axes
from .weight_products import Axes, Product, axes_of

if TYPE_CHECKING:
    from .quantised_weight import QuantisedWeight
    from .weight_products import Weight

NO_ADAPTER = 0
"""The number of rows without an adapter; the adapters are numbered from 1."""
_RANKS, _ROWS = "R", "B"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AdaptedWeight:
    """A weight, and the matrices of adapters for it."""

    base: "jax.Array | QuantisedWeight"
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


def multiply_adapted(
    project: Callable[..., jax.Array],
    equation: str,
    product: Product,
    x: jax.Array,
    weight: "Weight",
    adapter_B: jax.Array | None,
    x_axes: Axes,
    out_axes: Axes,
    dtype: jax.typing.DTypeLike | None,
) -> jax.Array:
    """Multiply activations with an adapted weight.

    Args:
      project: `Operations.project`, for products with weights that are not adapted.
      equation: The einsum of activations and weight, with `B` as rows.
      product: The product that computes it.
      x: Activations.
      weight: The parameter with an `AdaptedWeight`.
      adapter_B: The number of each row's adapter; None if no row has one.
      x_axes: The logical axes of `x`.
      out_axes: The logical axes of the result.
      dtype: The dtype of the result; by default that of `x`.
    """
    value, declared = weight[...], axes_of(weight)
    assert isinstance(value, AdaptedWeight), "the caller has found an adapted weight"
    metadata = weight.get_metadata()  # pyright: ignore[reportAttributeAccessIssue]
    inputs = metadata["inputs"]

    def parameter(part: Any, logical_axes: Axes) -> Any:
        return weight.copy(part, logical_axes=logical_axes)  # pyright: ignore

    base = parameter(value.base, declared)
    out = project(equation, product, x, base, x_axes, out_axes, dtype)
    if adapter_B is None:
        return out
    operands, out_labels = equation.split("->")
    x_labels, labels = operands.split(",")
    down_labels = "".join(_inputs_of(labels, inputs)) + _RANKS
    up_labels = "".join(replace_axes(tuple(labels), inputs, _RANKS))
    steps = [
        (down_labels, parameter(value.down, down_axes(declared, inputs))),
        (up_labels, parameter(value.up, replace_axes(declared, inputs, ""))),
    ]
    if not set(down_labels) - {_RANKS} <= set(x_labels):
        # the product sums over outputs of the weight, as absorbed attention does
        steps.reverse()
    (first_labels, first), (second_labels, second) = steps
    summed = set(first_labels) & set(x_labels) - set(out_labels)
    ranks_labels = "".join(label for label in x_labels if label not in summed) + _RANKS
    axis_of = dict(zip(out_labels, out_axes, strict=bool(out_axes)))
    ranks_axes = tuple(axis_of.get(label, "") for label in ranks_labels) if out_axes else ()
    ranks = project(
        *_flat_einsum(x_labels, first_labels, ranks_labels), x, first, x_axes, ranks_axes
    )
    ranks = jnp.where(_is_own(adapter_B, ranks.shape, ranks_labels, value.count), ranks, 0)
    change = project(
        *_flat_einsum(ranks_labels, second_labels, out_labels),
        ranks, second, ranks_axes, out_axes, jnp.float32,
    )  # fmt: skip
    has_adapter = _along(adapter_B != NO_ADAPTER, out.ndim, out_labels.index(_ROWS))
    return jnp.where(has_adapter, (out.astype(jnp.float32) + change).astype(out.dtype), out)


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


def _flat_einsum(x_labels: str, labels: str, out_labels: str) -> tuple[str, Product]:
    """An einsum in float32, with several summed axes at the end of `x` as one.

    With three axes, XLA copies the weights in every call.
    """
    equation = f"{x_labels},{labels}->{out_labels}"
    summed = [label for label in x_labels if label not in out_labels]
    num_summed, is_flat = len(summed), False
    if num_summed > 1:
        end = "".join(summed)
        is_flat = x_labels.endswith(end) and labels.startswith(end)

    def product(x: jax.Array, weight: jax.Array) -> jax.Array:
        if not is_flat:
            return jnp.einsum(equation, x, weight, preferred_element_type=jnp.float32)
        x = x.reshape(*x.shape[:-num_summed], -1)
        weight = weight.reshape(-1, *weight.shape[num_summed:])
        return jnp.tensordot(x, weight, 1, preferred_element_type=jnp.float32)

    return equation, product
