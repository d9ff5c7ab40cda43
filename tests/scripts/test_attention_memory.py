"""The table of attention's temporary memory: the shapes explain its bytes."""

from functools import partial

from numerics_helpers import script

from noria.modelzoo.attention.attend import attend_dense
from noria.modelzoo.attention.blockwise import attend_blockwise

MEMORY = script("scripts/attention_memory.py")


def test_attention_at_once_keeps_all_scores_and_blocks_a_piece_of_them():
    dense = MEMORY.temporary_bytes(attend_dense, 2048)
    assert 2048 * 2048 * 4 <= dense <= 3 * 2048 * 2048 * 4
    blocks = partial(attend_blockwise, query_block=128, block_scores=128 * 128)
    copies_of_arguments = 2 * 2048 * 64 * 4
    assert MEMORY.temporary_bytes(blocks, 2048) < 4 * 128 * 128 * 4 + copies_of_arguments
