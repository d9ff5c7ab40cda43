"""Operations whose implementation depends on the layout, with their reference on one device.

Blocks call these with the logical axes of their arrays. `sharding` implements them over a mesh; its
implementation is injected and must equal this one. Knows nothing of meshes.
"""

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .axes import row_axis
from .cache.segments import IN_ORDER, ONE_STRIPE, Segments, Stripe, Stripes
from .weights.adapted_weight import AdaptedWeight, add_change, base_of, multiply_adapters
from .weights.product import Product
from .weights.quantised_weight import take_rows
from .weights.weight_products import Axes, multiply

if TYPE_CHECKING:
    from flax import nnx

    from .attention.attend import Attend, AttendEntries
    from .layer_config import Window
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

    def _multiply(
        self, product: Product, x: jax.Array, weight: "Weight", x_axes: Axes, out_axes: Axes,
        dtype: jax.typing.DTypeLike | None,
    ) -> jax.Array:  # fmt: skip
        """Multiply activations with a weight that is not adapted; see `project`."""
        return multiply(product, x, weight, x_axes, out_axes, dtype)

    def lookup(self, table: "nnx.Param", ids_BT: jax.Array, out_axes: Axes) -> jax.Array:
        """Look up rows of a table by id."""
        del out_axes
        # the host has checked the ids: an id out of range would be clipped silently
        return take_rows(table[...], ids_BT)

    def attend(
        self,
        body: Callable[..., tuple[jax.Array, Any]],
        num_kv_heads: int,
        *,
        writes_cache: bool,
    ) -> Callable[..., tuple[jax.Array, Any]]:
        """Return the attention of a layer under this layout.

        Args:
          body: A function `body(queries, new, latents, rows, caches)` that treats rows and
            key/value heads independently. `new` are keys and values with the heads of the
            projections, or None. `rows` and each of `caches` are named tuples that declare the axes
            of their arrays as `AXES`. `body` returns the attention output and the cache update.
          num_kv_heads: The key/value heads of the layer, without copies.
          writes_cache: Whether the cache update is the updated first cache. Otherwise it is the new
            entries: `latents` if there are any, else `new`.

        Returns:
          A function like `body`.
        """
        del writes_cache
        return body

    def attend_gathered(
        self, body: Callable[..., tuple[jax.Array, Any]], num_kv_heads: int
    ) -> Callable[..., tuple[jax.Array, Any]]:
        """Return the attention of a layer whose rows may belong to slots of any device.

        Every device gets all rows and tokens, and its part of the cache. The cache update is the
        updated first cache. See `attend` for the arguments and the result.
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

    def over_cache(self, attend: "AttendEntries", window: "Window") -> "AttendEntries":
        """Attention to the whole cache, for use inside `attend`.

        The result takes the positions of all queries, and the queries and cache entries on this
        device.
        """
        del window
        return attend

    @property
    def stripe(self) -> Stripe:
        """The stripe of the cache on this device, inside `attend`, `by_row` and `write_rows`."""
        return ONE_STRIPE

    def by_row(self, body: Callable[..., Any], state: Any, *rows: jax.Array) -> Any:
        """Update per-slot arrays by a function that treats rows independently.

        Args:
          body: A function `body(state, *rows)` that returns a tree like `state`.
          state: A named tuple that declares its axes as in `attend`.
          *rows: Arrays whose first axis is the batch rows of attention.
        """
        return body(state, *rows)

    def mix_experts(
        self, mixture: "Mixture", x_BTD: jax.Array, is_token_BT: jax.Array, router: "Router",
        weights: "ExpertWeights",
    ) -> "MoeOutput":  # fmt: skip
        """Run the mixture of experts of a sparse layer."""
        return mixture(x_BTD, is_token_BT, router, weights)

    def take_rows(
        self,
        segments: Segments,
        row_B: jax.Array,
        logical_axes: Axes,
        layer: jax.Array | None = None,
    ) -> Segments:
        """Take rows of the arrays of segments, with zeros for rows that a segment does not have.

        Args:
          segments: Arrays with the same logical axes. The first has all rows. Of the others, a
            device may have only the first few of its rows.
          row_B: The rows to take.
          logical_axes: The logical axes of the arrays.
          layer: The layer to take, if the first axis of the arrays is layers.
        """
        axis = row_axis(logical_axes)
        return tuple(rows_of(x, row_B, layer, axis) for x in segments)

    def after(self, row_B: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """Make `row_B` depend on the residual stream `x_BTD`, to order reads and writes.

        XLA for CPU first runs operations without pending inputs. Without this dependency it would
        gather the rows of all layers before the first layer, and keep them in memory. If a write
        did not depend on the read before it, XLA would write to a copy of the array. An
        optimization barrier does not help, as it is removed before operations are scheduled.
        """
        is_never = x_BTD.ravel()[0] < -jnp.inf
        return jnp.where(is_never, 0, row_B)

    def write_rows(
        self, body: Callable[..., Any], old: Any, new: Any, rows: Any, logical_axes: Axes
    ) -> Any:
        """Write rows to arrays like those of `take_rows`.

        Args:
          body: A function `body(old, new, rows)` that returns the updated arrays.
          old: The arrays to write to.
          new: B new rows, with the other axes of `old`.
          rows: A named tuple of arrays. The first has B entries: the row of `old` that each new row
            belongs to. A row that `old` does not have is not written.
          logical_axes: The logical axes of `old`.
        """
        del logical_axes
        return body(old, new, rows)

    def has_cache_of(self, cache_operations: "Operations") -> bool:
        """Whether `attend` can read all slots of a cache that `cache_operations` lays out.

        If so, the keys and values of slots need not be gathered first.
        """
        del cache_operations
        return True

    def num_cache_heads(self, num_kv_heads: int) -> int:
        """The number of key/value heads in attention, copies included."""
        return num_kv_heads

    def top_k(self, logits_BV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """The k largest values of each row and their ids; ties in ascending order of ids."""
        return jax.lax.top_k(logits_BV, k)


def rows_of(
    x: jax.Array, row_B: jax.Array, layer: jax.Array | None = None, axis: int = 0
) -> jax.Array:
    """Rows of an array along `axis`, with zeros for a row past the last.

    If `layer` is given, the first axis of the array is layers, and the rows of one layer are taken.
    """
    if layer is None:
        return x.at[(slice(None),) * axis + (row_B,)].get(mode="fill", fill_value=0)
    if x.shape[0] == 1:
        return rows_of(x[0], row_B)
    return x.at[layer, row_B].get(mode="fill", fill_value=0)


ON_ONE_DEVICE = Operations()
