"""The blocks of queries that kernels over pages serve, the pages of each block, and the masks.

The consecutive queries of a row are served in *blocks* of as many tokens as a kernel multiplies at
once. The tokens and heads of a block are the rows of one product. A block reads the pages from the
first in which its first token sees an entry to the page of its own last token, and no others.

Knows nothing of memory, copies or platforms. Guarantees: blocks follow from static sizes, and
everything else from a row's own position and count, so neighbours change nothing.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..attention.attend import first_visible
from ..attention.paged import PagedRows, read_range
from ..layer_config import Scores, Window
from .call import AttentionCall


class ReadPages(NamedTuple):
    """The pages of a row that each block reads, and the positions of its tokens."""

    first_page_C: Any
    """The index of the block's first page in the pages of its row."""
    end_page_C: Any
    """The index after its last page; equal to the first one if it has no tokens."""
    first_C: Any
    """The position of its first token."""
    count_C: Any
    """Its tokens."""


class QueryBlocks(NamedTuple):
    """The split of queries into blocks: static facts of a call."""

    per_row: int
    num_tokens: int
    """Tokens of a block."""
    num_heads: int
    """Query heads of a group."""
    num_rows: int
    """The rows of a product, those of padding included."""
    window: Window

    @classmethod
    def of(
        cls, q_BTKGH: jax.Array, most_tokens: int, multiple: int, window: Window
    ) -> "QueryBlocks":
        """Blocks of alike size.

        Args:
          q_BTKGH: The queries.
          most_tokens: The maximum number of tokens of a block.
          multiple: The rows of a product are padded to a multiple of it.
          window: The window of the layer.
        """
        _, T, _, G, _ = q_BTKGH.shape
        per_row = -(-T // max(1, most_tokens))
        num_tokens = -(-T // per_row)
        return cls(per_row, num_tokens, G, -(-num_tokens * G // multiple) * multiple, window)

    def split(self, q_BTKGH: jax.Array, scores: Scores, key_dim: int) -> jax.Array:
        """The scaled queries of each block and key/value head, as the rows of a product.

        Features are padded with zeros to those of keys.
        """
        B, T, K, G, H = q_BTKGH.shape
        scale = H**-0.5 if scores.scale is None else scores.scale
        q_BTKGH = (q_BTKGH * scale).astype(q_BTKGH.dtype)
        C, T_block = B * self.per_row, self.num_tokens
        padding = self.per_row * T_block - T
        q_BTKGH = jnp.pad(q_BTKGH, ((0, 0), (0, padding), (0, 0), (0, 0), (0, 0)))
        q_CKTGH = q_BTKGH.reshape(C, T_block, K, G, H).transpose(0, 2, 1, 3, 4)
        padding = (0, 0), (0, 0), (0, self.num_rows - T_block * G), (0, key_dim - H)
        return jnp.pad(q_CKTGH.reshape(C, K, T_block * G, H), padding)

    def join(self, x_CKAH: jax.Array, num_queries: int) -> jax.Array:
        """The results of rows `x_BTKGH` from those of blocks."""
        C, K, _, H = x_CKAH.shape
        T_block, G = self.num_tokens, self.num_heads
        x_CKTGH = x_CKAH[:, :, : T_block * G].reshape(C, K, T_block, G, H)
        x_BTKGH = x_CKTGH.transpose(0, 2, 1, 3, 4).reshape(-1, self.per_row * T_block, K, G, H)
        return x_BTKGH[:, :num_queries]

    def read_pages(self, rows: PagedRows, page: int) -> ReadPages:
        """The pages that each block reads."""
        offset_1J = jnp.arange(self.per_row)[None] * self.num_tokens
        first_C = (rows.first_B[:, None] + offset_1J).ravel()
        count_C = jnp.clip(rows.count_B[:, None] - offset_1J, 0, self.num_tokens).ravel()
        is_read_C = count_C > 0
        begin_C, end_C = (
            None if x is None else jnp.repeat(x, self.per_row) for x in (rows.begin_B, rows.end_B)
        )
        blocks = PagedRows(rows.page_BN, first_C, count_C, begin_C, end_C)
        first_page_C, last_page_C = read_range(blocks, page, self.window)
        is_read_C &= last_page_C >= first_page_C
        first_page_C = jnp.where(is_read_C, first_page_C, 0)
        end_page_C = jnp.where(is_read_C, last_page_C + 1, 0)
        count_C = jnp.where(is_read_C, count_C, 0)
        scalars = first_page_C, end_page_C, first_C, count_C
        return ReadPages(*(x.astype(jnp.int32) for x in scalars))

    def row(self, block: Any) -> Any:
        """The row of a block."""
        return block if self.per_row == 1 else jax.lax.div(block, jnp.int32(self.per_row))

    def sees(self, row: Any, entry: Any, first: Any, count: Any) -> Any:
        """Whether rows of a product see entries. A block without tokens is not asked.

        Args:
          row: The indices of the rows of the product.
          entry: The positions of entries, in the shape of `row`.
          first: The position of the block's first token.
          count: The tokens of the block.
        """
        if self.num_tokens == 1:
            position, is_seen = first, entry <= first
        else:
            token = row if self.num_heads == 1 else jax.lax.div(row, jnp.int32(self.num_heads))
            position = first + token
            is_seen = (entry <= position) & (token < count)
        if self.window is None:
            return is_seen
        return is_seen & (entry >= first_visible(position, self.window))


def refusal_of_all(call: AttentionCall) -> str | None:
    """The reason why no kernel over pages can serve a call, or None."""
    if call.page is None:
        return "it takes a cache in pages (buckets.page)"
    if not call.is_placed:
        return "it takes a cache in pages on one device or under a layout"
    if call.stripes > 1:
        return f"it takes pages with all their entries on one device, got {call.stripes} devices"
    if call.sees_later:
        return "it takes no windows in both directions"
    return None
