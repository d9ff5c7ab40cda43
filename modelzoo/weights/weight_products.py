"""Products of activations with weights on one device.

An `Operations` of a layout multiplies parts of arrays with the same functions. Knows nothing of
layouts.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp

from .packed_products import Rows, multiply_panels
from .packed_weight import PackedWeight
from .product import Product
from .quantised_weight import QuantisedWeight, multiply_codes

if TYPE_CHECKING:
    # a start from a bundle loads executables before it imports flax
    from flax import nnx

    Weight = nnx.Param | jax.Array | QuantisedWeight
    """A parameter, or the part of it on one device. A parameter may have a quantised value, or one
    in panels."""

Axes = tuple[str, ...]
"""The logical axes of an array."""
Project = Callable[..., jax.Array]
"""The type of `Operations.project`."""


class Part(NamedTuple):
    """The part of a product that a device computes."""

    max_over_parts: Callable[[jax.Array], jax.Array] = lambda x: x
    """See `multiply_codes`."""
    rows: Rows | None = None
    """See `multiply_panels`."""


WHOLE = Part()


def multiply(
    product: Product,
    x: jax.Array,
    weight: "Weight",
    x_axes: Axes = (),
    out_axes: Axes = (),
    dtype: jax.typing.DTypeLike | None = None,
    part: Part = WHOLE,
) -> jax.Array:
    """Multiply activations with a weight, or a part of it; see `Operations.project`."""
    del x_axes, out_axes
    value = weight[...]
    dtype = jnp.dtype(dtype or x.dtype)
    if isinstance(value, PackedWeight):
        return multiply_panels(product, x, value, dtype, part.rows)
    if isinstance(value, QuantisedWeight):
        out = multiply_codes(product, x, value, *part)
    else:
        out = product(x, value)
    return out.astype(dtype)


def axes_of(weight: "Weight") -> Axes:
    """The logical axes that a parameter declares."""
    assert not isinstance(weight, jax.Array | QuantisedWeight), "a part declares no axes"
    return weight.get_metadata()["logical_axes"]
