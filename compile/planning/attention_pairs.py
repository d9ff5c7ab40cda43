"""The queries, keys and cache entries that the attention of one layer reads in a call.

Windows bound them. A decode step reads the entries that rows hold, in whole pages, and so does a
call of chunks: each row reads up to the end of its own piece.

Knows nothing of heads, bytes, layouts or hardware.
"""

from dataclasses import replace

from ...modelzoo.attention.attend import first_visible
from ...modelzoo.attention.blockwise import block_sizes
from ...modelzoo.layer_config import BothSides, Window, window_size
from ...sharding.call import Call


def read_entries(call: Call, window: Window) -> float:
    """The entries that a decode step or a call of chunks reads in one layer.

    A row with a window reads the pages that the windows of its tokens touch: on average, at most
    one page more than they are long together. Rows count as equally long, so a little less is read
    if some rows are shorter than the window, or slots are idle.
    """
    assert call.entries is not None
    if window is None:
        return call.entries
    # layers with windows read nothing for several rows at once
    seen = call.entries if call.seen is None else call.seen
    return min(seen, call.rows * (window_size(window) + call.tokens - 1 + call.page))


def num_pairs(call: Call, window: Window) -> float:
    """Number of query-key pairs that attention computes in one layer, in whole blocks."""
    if call.entries is not None:
        seen = call if call.seen is None else replace(call, entries=call.seen)
        return call.tokens * read_entries(seen, window)
    block_T, block_S = block_sizes(call.tokens, call.span)
    pairs = 0
    for start in range(0, call.span, block_T):
        seen_from = 0 if window is None else max(0, first_visible(start, window))
        last = min(start + block_T, call.span) - 1
        if isinstance(window, BothSides):
            last = call.span - 1 if window.reach is None else last + window.reach
            last = min(last, call.span - 1)
        num_blocks = last // block_S - seen_from // block_S + 1
        pairs += block_T * min(num_blocks * block_S, call.span)
    return call.rows * pairs
