"""Operations whose implementation depends on the layout, with their reference on one device.

Blocks call these with the logical axes of their arrays. `sharding` implements them over a mesh; its
implementation is injected and must equal this one. Knows nothing of meshes.
"""

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from .axes import row_axis
from .cache.stripes import IN_ORDER, ONE_STRIPE, Stripe, Stripes
from .cpu.objects import is_loaded
from .weights.adapted_weight import AdaptedWeight, add_change, base_of, multiply_adapters
from .weights.packed_products import Rows
from .weights.product import Product
from .weights.quantised_weight import take_rows
from .weights.weight_products import Axes, Part, multiply

if TYPE_CHECKING:
    from flax import nnx

    from .attention.attend import Attend
    from .moe.experts import ExpertWeights
    from .moe.mix import Mixture, MoeOutput
    from .moe.routing import Router
    from .weights.weight_products import Weight


class Operations:
    """The operations on one device, where logical axes have no effect."""

    prompt_stripes: Stripes = IN_ORDER
    """The order of the tokens of a prompt."""
    cache_stripes: Stripes = IN_ORDER
    """The order of the entries of the cache."""
    _adapter_B: jax.Array | None = None
    _rows: Rows | None = None

    def positions(self, length: int) -> jax.Array | np.ndarray:
        """`position_1T` of the tokens of a prompt, in the order of `prompt_stripes`."""
        return np.arange(length)[None]

    def constrain(self, x: jax.Array, logical_axes: Axes) -> jax.Array:
        """Constrain the sharding of `x` to its logical axes."""
        del logical_axes
        return x

    def project(
        self, product: Product, x: jax.Array, weight: "Weight", x_axes: Axes = (),
        out_axes: Axes = (), dtype: jax.typing.DTypeLike | None = None,
    ) -> jax.Array:  # fmt: skip
        """Multiply activations with a weight. All products with weights go through this method.

        Args:
          product: The product of `x` and `weight`.
          x: Activations.
          weight: The weight.
          x_axes: The logical axes of `x`; not needed if the device has all arrays whole.
          out_axes: The logical axes of the result; not needed if the device has all arrays whole.
          dtype: The dtype of the result; by default that of `x`.
        """
        if not isinstance(weight[...], AdaptedWeight):
            return self._multiply(product, x, weight, x_axes, out_axes, dtype)
        out = self.project(product, x, base_of(weight), x_axes, out_axes, dtype)
        if (rows := self._adapter_B) is None:
            return out
        change = multiply_adapters(self.project, product, x, weight, rows, x_axes, out_axes)
        return add_change(out, change, rows, product)

    def for_adapters(self, adapter_B: jax.Array | None) -> "Operations":
        """The operations of a call whose rows use these adapters; see `adapted_weight`."""
        if adapter_B is None:
            return self
        adapted = copy(self)
        adapted._adapter_B = adapter_B
        return adapted

    def for_tokens(self, is_token: jax.Array) -> "Operations":
        """The operations of a call that has tokens in some of its rows.

        Kernels that skip rows leave zeros in the results of the others.
        """
        if not is_loaded():
            return self
        of_tokens = copy(self)
        of_tokens._rows = Rows.of(is_token)
        return of_tokens

    def _multiply(
        self, product: Product, x: jax.Array, weight: "Weight", x_axes: Axes, out_axes: Axes,
        dtype: jax.typing.DTypeLike | None,
    ) -> jax.Array:  # fmt: skip
        """Multiply activations with a weight that is not adapted; see `project`."""
        return multiply(product, x, weight, x_axes, out_axes, dtype, Part(rows=self._rows))

    def lookup(self, table: "nnx.Param", ids_BT: jax.Array, out_axes: Axes) -> jax.Array:
        """Look up rows of a table by id."""
        del out_axes
        # the host has checked the ids: an id out of range would be clipped silently
        return take_rows(table[...], ids_BT)

    def attend(
        self, body: Callable[..., tuple[jax.Array, Any]], num_kv_heads: int
    ) -> Callable[..., tuple[jax.Array, Any]]:
        """Return the attention of a layer under this layout.

        Args:
          body: A function `body(queries, new, latents, rows, cache)` that treats rows and key/value
            heads independently. `new` are keys and values with the heads of the projections, or
            None. `rows` is a named tuple that declares the axes of its arrays as `AXES`. `body`
            returns the attention output, and the updated cache, or the new entries if there is no
            cache: `latents` if there are any, else `new`.
          num_kv_heads: The key/value heads of the layer, without copies.

        Returns:
          A function like `body`.
        """
        del num_kv_heads
        return body

    def attend_gathered(
        self, body: Callable[..., tuple[jax.Array, Any]], num_kv_heads: int
    ) -> Callable[..., tuple[jax.Array, Any]]:
        """Return the attention of a layer whose rows may belong to slots of any device.

        Every device gets all rows and tokens, and its part of the cache. See `attend` for the
        arguments and the result.
        """
        del num_kv_heads
        return body

    def local_pages(self, page_BN: jax.Array, num_pages: int) -> jax.Array:
        """Number pages as on this device, which has `num_pages`, for use inside `attend`.

        Pages of other devices get numbers past the last page.
        """
        del num_pages
        return page_BN

    def merge_pages(
        self, out_BTKGH: jax.Array, lse_BTKG: jax.Array, *, is_gathered: bool
    ) -> tuple[jax.Array, jax.Array]:
        """Merge attention of rows to the pages of all devices that have entries of them.

        It is for use inside `attend_gathered`, or else inside `attend`.
        """
        del is_gathered
        return out_BTKGH, lse_BTKG

    def over_tokens(self, attend: "Attend") -> "Attend":
        """Attention to all tokens of a prompt, for use inside `attend`.

        The result takes the positions of all tokens, and queries, keys and values of the tokens on
        this device.
        """
        return attend

    @property
    def stripe(self) -> Stripe:
        """The stripe of the cache on this device, inside `attend` and `write_rows`."""
        return ONE_STRIPE

    def mix_experts(
        self, mixture: "Mixture", x_BTD: jax.Array, is_token_BT: jax.Array, router: "Router",
        weights: "ExpertWeights",
    ) -> "MoeOutput":  # fmt: skip
        """Run the mixture of experts of a sparse layer."""
        return mixture(x_BTD, is_token_BT, router, weights)

    def take_row(self, x: jax.Array, row: jax.Array, logical_axes: Axes) -> jax.Array:
        """Take one row of an array, with zeros for a row that it does not have.

        Args:
          x: The array.
          row: The row to take.
          logical_axes: The logical axes of the array.
        """
        return row_of(x, row, logical_axes)

    def write_rows(
        self, body: Callable[..., Any], old: Any, new: Any, rows: Any, logical_axes: Axes
    ) -> Any:
        """Write rows to arrays with the same logical axes.

        Args:
          body: A function `body(old, new, rows)` that returns the updated arrays.
          old: The arrays to write to.
          new: B new rows, with the other axes of `old`.
          rows: A named tuple of arrays. The first has B entries, or B rows of them: the rows of
            `old` that each new row belongs to. A row that `old` does not have is not written.
          logical_axes: The logical axes of `old`.
        """
        del logical_axes
        return body(old, new, rows)

    def num_cache_heads(self, num_kv_heads: int) -> int:
        """The number of key/value heads in attention, copies included."""
        return num_kv_heads

    def top_k(self, logits_BV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """The k largest values of each row and their ids; ties in ascending order of ids."""
        return jax.lax.top_k(logits_BV, k)


def row_of(x: jax.Array, row: jax.Array, logical_axes: Axes) -> jax.Array:
    """One row of an array, with an axis of size one; zeros for a row past the last."""
    index = (slice(None),) * row_axis(logical_axes) + (row[None],)
    return x.at[index].get(mode="fill", fill_value=0)


ON_ONE_DEVICE = Operations()
