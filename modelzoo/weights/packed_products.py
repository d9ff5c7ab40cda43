"""Products on the CPU by kernels of our own, with weights in panels.

Knows nothing of layers. Guarantees: equals the product of the weight in its own order up to the
order of sums. Where a kernel serves, each number of the result is one sum in the order of the
inputs, so a row's bits depend on its own activations alone.
"""

import jax
import jax.numpy as jnp

from ..cpu import PRODUCTS, product_name
from .packed_weight import PackedWeight
from .product import Product


def multiply_panels(
    product: Product, x: jax.Array, weight: PackedWeight, dtype: jnp.dtype
) -> jax.Array:
    """Multiply activations with a weight in panels.

    A product that the kernels do not compute is computed with the weight in its own order, which
    is made anew in each call.

    Args:
      product: The product of activations and the weight.
      x: Activations; they may have more leading axes than the equation.
      weight: The weight.
      dtype: The dtype of the result.
    """
    if not _is_served(product, x, weight, dtype):
        return product(x, weight.plain()).astype(dtype)
    num_groups, num_inputs, num_columns = weight.matrices
    leading = x.shape[: -len(weight.inputs)]
    x_MK = x.reshape(-1, num_inputs)
    result = jax.ShapeDtypeStruct((num_groups, len(x_MK), num_columns), dtype)
    multiply = jax.ffi.ffi_call(product_name(x.dtype.name, dtype.name), result)
    # profiles name products by their equations
    with jax.named_scope(product.equation):
        out_GMN = multiply(x_MK, weight.numbers.reshape(weight.matrices))
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
