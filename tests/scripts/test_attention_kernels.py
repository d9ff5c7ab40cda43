"""Bytes that kernels move, counted by blocks, and the compiler's figures of a graph."""

from numerics_helpers import script

from noria.modelzoo.attention.blockwise import attend_blockwise

KERNELS = script("scripts/attention_kernels.py")


def test_pairs_of_blocks_are_those_below_the_diagonal():
    assert KERNELS.visible_pairs(8, 2, 2) == 1 + 2 + 3 + 4
    assert KERNELS.visible_pairs(8, 2, 4) == 1 + 1 + 2 + 2
    assert KERNELS.visible_pairs(5, 2, 4) == 1 + 1 + 2


def test_a_prompt_of_one_block_is_brought_to_the_chip_once():
    of_each = KERNELS.K * KERNELS.G * 512 * KERNELS.H * 2
    assert KERNELS.splash_bytes(512) == 4 * of_each


def test_a_compiled_graph_says_what_it_reads():
    cost = KERNELS.attention_cost("cpu", attend_blockwise, 64)
    keys_and_values = 2 * KERNELS.K * KERNELS.H * 64 * 2
    assert cost.bytes > keys_and_values
