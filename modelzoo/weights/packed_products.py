"""Products on the CPU by kernels of our own, with weights in panels.

Knows nothing of layers. Guarantees: equals the product of the weight in its own order up to the
order of sums. Where a kernel serves, each number of the result is one sum in the order of the
inputs, so a row's bits depend on its own activations alone.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..cpu import PRODUCTS, product_name
from .packed_weight import PackedWeight
from .product import Product


class Rows(NamedTuple):
    """The rows of activations that are computed; the results of others are zero."""

    is_used: jax.Array
    """Whether a row is computed, in the shape of the rows."""
    order: jax.Array
    """The number of these rows, these rows, and the others, as the kernels read them."""

    @classmethod
    def of(cls, is_used: jax.Array) -> "Rows":
        """The rows that are used."""
        used = is_used.reshape(-1)
        order = jnp.argsort(~used, stable=True)
        return cls(is_used, jnp.append(used.sum(), order).astype(jnp.int32))


def multiply_panels(
    product: Product,
    x: jax.Array,
    weight: PackedWeight,
    dtype: jnp.dtype,
    rows: Rows | None = None,
) -> jax.Array:
    """Multiply activations with a weight in panels.

    A product that the kernels do not compute is computed with the weight in its own order, which
    is made anew in each call.

    Args:
      product: The product of activations and the weight.
      x: Activations; they may have more leading axes than the equation.
      weight: The weight.
      dtype: The dtype of the result.
      rows: The rows to compute; all if these are not the rows of `x`, or None.
    """
    if not _is_served(product, x, weight, dtype):
        return product(x, weight.plain()).astype(dtype)
    num_groups, num_inputs, num_columns = weight.matrices
    leading = x.shape[: -len(weight.inputs)]
    x_MK = x.reshape(-1, num_inputs)
    M = len(x_MK)
    order = np.arange(-1, M, dtype=np.int32)
    order[0] = M
    if rows is not None and rows.is_used.shape == leading:
        order = rows.order
    result = jax.ShapeDtypeStruct((num_groups, M, num_columns), dtype)
    multiply = jax.ffi.ffi_call(product_name(x.dtype.name, dtype.name), result)
    # profiles name products by their equations
    with jax.named_scope(product.equation):
        out_GMN = multiply(x_MK, weight.numbers.reshape(weight.matrices), order)
    groups, columns = weight.split(weight.shape)
    return out_GMN.reshape(*groups, *leading, *columns)


def _is_served(product: Product, x: jax.Array, weight: PackedWeight, dtype: jnp.dtype) -> bool:
    """Whether a kernel computes a product: that of rows and one matrix, or one for each group."""
    labels, inputs = product.labels, weight.inputs
    summed = "".join(labels.weight[axis] for axis in inputs)
    groups, columns = weight.split(labels.weight)
    rows = labels.x.removesuffix(summed)
    is_matrix = labels.x.endswith(summed) and labels.out == groups + rows + columns
    is_known = (x.dtype.name, dtype.name) in PRODUCTS and x.dtype == weight.dtype
    return is_matrix and is_known
