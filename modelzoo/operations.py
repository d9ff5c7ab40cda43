"""The operations that a layout may carry out in its own way, and their reference on one device.

Blocks say what they compute and which logical axes the arrays have; `sharding` has the operations
over a mesh, which are injected and must equal these. Knows nothing of meshes.
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .axes import row_axis
from .segments import Segments
from .stripes import IN_ORDER, ONE_STRIPE, Stripe, Stripes

if TYPE_CHECKING:
    from flax import nnx

    from .attention import Attend, AttendEntries
    from .config import Window
    from .moe.experts import ExpertWeights
    from .moe.mix import Mixture, MoeOutput
    from .moe.routing import Router

    Weight = nnx.Param | jax.Array
    """A parameter, or what one device has of it."""

Axes = tuple[str, ...]
Product = Callable[[jax.Array, jax.Array], jax.Array]
"""A product of activations and a weight, linear in both, for whole arrays and pieces alike."""
Project = Callable[..., jax.Array]
"""`Operations.project`."""


class Operations:
    """One device: every operation is what it says, and placement means nothing."""

    prompt_stripes: Stripes = IN_ORDER
    """The order in which the tokens of a prompt lie."""
    cache_stripes: Stripes = IN_ORDER
    """The order in which the entries of the cache lie."""

    def positions(self, length: int) -> jax.Array | np.ndarray:
        """`position_1T` of the tokens of a prompt, in the order in which they lie."""
        return np.arange(length)[None]

    def constrain(self, x: jax.Array, logical_axes: Axes) -> jax.Array:
        """Lay `x` out by its logical axes."""
        del logical_axes
        return x

    def project(
        self, equation: str, product: Product, x: jax.Array, weight: "Weight", x_axes: Axes = (),
        out_axes: Axes = (),
    ) -> jax.Array:  # fmt: skip
        """`product(x, weight)`, which is the einsum of `equation`, from `x_axes` to `out_axes`.

        Every product with a weight is made here; arrays that one device has whole need no axes.
        """
        del equation, x_axes, out_axes
        return product(x, weight[...])

    def lookup(self, table: "nnx.Param", ids_BT: jax.Array, out_axes: Axes) -> jax.Array:
        """Rows of a table."""
        del out_axes
        # ids are checked on the host: an id out of range would silently clamp here
        return table[...].at[ids_BT].get(mode="clip")

    def attend(
        self, body: Callable[..., tuple[jax.Array, Any]], *, writes_cache: bool
    ) -> Callable[..., tuple[jax.Array, Any]]:
        """`body(queries, new, latents, rows, cache)`: a layer's attention, and what is kept.

        `body` treats rows and key/value heads independently. `new` are keys and values of the
        projections or None; `rows` and `cache` are named tuples that declare the axes of their
        arrays as `AXES`; a prompt has no cache. What is kept is like `cache` where `body` writes
        the cache, else like `latents` or, without latents, like `new`.
        """
        del writes_cache
        return body

    def over_tokens(self, attend: "Attend") -> "Attend":
        """Inside `attend`: attention to all tokens of a prompt, whatever part of them is here.

        Its positions are of all tokens, its queries, keys and values of those that are here.
        """
        return attend

    def over_cache(self, attend: "AttendEntries", window: "Window") -> "AttendEntries":
        """Inside `attend`: attention to the whole cache, whatever part of its entries is here.

        Its positions are of all queries, its queries and entries those that are here.
        """
        del window
        return attend

    @property
    def stripe(self) -> Stripe:
        """Inside `attend`, `by_row`, `write_rows`: the stripe of the cache here."""
        return ONE_STRIPE

    def by_row(self, body: Callable[..., Any], kept: Any, *rows: jax.Array) -> Any:
        """`body(kept, *rows)`, like `kept`, of arrays that lead with the rows of attention.

        `body` treats rows independently; `kept` declares its axes as in `attend`.
        """
        return body(kept, *rows)

    def mix_experts(
        self, mixture: "Mixture", x_BTD: jax.Array, is_token_BT: jax.Array, router: "Router",
        weights: "ExpertWeights",
    ) -> "MoeOutput":  # fmt: skip
        """The mixture of a sparse layer."""
        return mixture(x_BTD, is_token_BT, router, weights)

    def take_rows(
        self,
        segments: Segments,
        row_B: jax.Array,
        logical_axes: Axes,
        layer: jax.Array | None = None,
    ) -> Segments:
        """Rows `row_B` of arrays of rows, or of one layer of each; zeros for rows that they lack.

        The first array has all rows; each device may have only the first of its rows in others.
        """
        axis = row_axis(logical_axes)
        return tuple(rows_of(x, row_B, layer, axis) for x in segments)

    def after(self, row_B: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """`row_B`, not known before the residual stream `x_BTD` is computed.

        For the order of reads and writes. XLA's CPU backend starts first what waits for nothing, so
        the rows of all layers would be taken ahead of the first layer and lie there; and a write
        that waits for no read is made in a copy. An optimization barrier is gone by then.
        """
        is_never = x_BTD.ravel()[0] < -jnp.inf
        return jnp.where(is_never, 0, row_B)

    def write_rows(
        self, body: Callable[..., Any], old: Any, new: Any, rows: Any, logical_axes: Axes
    ) -> Any:
        """`body(old, new, rows)`: arrays of rows as in `take_rows`, after some rows were written.

        `new` has B rows and else the axes of `old`; the first of `rows` has B entries, which say to
        which row of `old` each belongs. Nothing is written for others.
        """
        del logical_axes
        return body(old, new, rows)

    def has_cache_of(self, cache_operations: "Operations") -> bool:
        """Whether `attend` sees all slots of a cache that `cache_operations` lays out.

        Keys and values of slots need not be brought together before.
        """
        del cache_operations
        return True

    def num_cache_heads(self, num_kv_heads: int) -> int:
        """Key/value heads that attention has of those of the model, copies included."""
        return num_kv_heads

    def top_k(self, logits_BV: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
        """The k largest values of each row and their ids; the lowest id first among equals."""
        return jax.lax.top_k(logits_BV, k)


def axes_of(weight: "Weight") -> Axes:
    """The logical axes that a parameter declares."""
    assert not isinstance(weight, jax.Array), "a piece of a parameter declares no axes"
    return weight.get_metadata()["logical_axes"]


def rows_of(
    x: jax.Array, row_B: jax.Array, layer: jax.Array | None = None, axis: int = 0
) -> jax.Array:
    """Rows of an array along `axis`, or of one of the layers that it leads with.

    They are zeros for a row past the last.
    """
    if layer is None:
        return x.at[(slice(None),) * axis + (row_B,)].get(mode="fill", fill_value=0)
    if x.shape[0] == 1:
        return rows_of(x[0], row_B)
    return x.at[layer, row_B].get(mode="fill", fill_value=0)


def einsum(equation: str, dtype: jax.typing.DTypeLike | None = None) -> tuple[str, Product]:
    """An equation and the product that it is, in `dtype` or else in that of the activations."""
    return equation, partial(product_of, equation, dtype=dtype)


def product_of(
    equation: str,
    x: jax.Array,
    weight: jax.Array,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """The einsum of activations and a weight, summed in float32 and rounded once.

    Args:
      equation: The einsum; activations lead with rows.
      x: Activations.
      weight: The weight.
      dtype: The dtype of the result; by default that of `x`.
    """
    # XLA for CPU converts the whole weight for a product that comes out in bfloat16
    rows = _at_least_two_rows(x)
    out = jnp.einsum(equation, rows, weight, preferred_element_type=jnp.float32)
    return out[: len(x)].astype(dtype or x.dtype)


def _at_least_two_rows(x: jax.Array) -> jax.Array:
    """`x`, twice if it is one row: for that XLA for CPU converts a whole bfloat16 weight."""
    is_one = x.dtype == jnp.bfloat16 and x.shape[0] == 1 and (x.ndim == 2 or x.shape[1] == 1)
    return jnp.concatenate([x, x]) if is_one else x


def gate_up_product(
    x: jax.Array, gate_up_PDF: jax.Array, dtype: jax.typing.DTypeLike | None = None
) -> jax.Array:
    """Gate and up `[P, ..., F]` of `x` `[..., D]`, in `dtype` or else in that of `x`."""
    # as a batch of two products: one call, and no backend has to lay the weights out anew
    rows = _at_least_two_rows(x)
    x_P = jnp.broadcast_to(rows[None], (2, *rows.shape))
    out = jnp.einsum("P...D,PDF->P...F", x_P, gate_up_PDF, preferred_element_type=jnp.float32)
    return out[:, : len(x)].astype(dtype or x.dtype)


ON_ONE_DEVICE = Operations()
