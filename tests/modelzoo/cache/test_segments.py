"""Keys in blocks against plain numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from noria.modelzoo.cache.segments import CPU_BLOCKS, blocks_shape, join_blocks, split_blocks


@pytest.mark.parametrize(("num_entries", "size"), [(12, 4), (10, 4), (4, 4), (3, 4), (5, 1)])
def test_each_block_has_its_positions_of_every_entry_of_a_head(num_entries, size):
    k_BKHS = np.random.default_rng(0).normal(size=(2, 3, 5, num_entries)).astype(np.float32)
    blocks = np.asarray(split_blocks(jnp.asarray(k_BKHS), size))
    count = -(-num_entries // size)
    assert blocks.shape == (2, 3, count * 5, size)
    for number in range(count):
        expected = k_BKHS[..., number * size : (number + 1) * size]
        block = blocks[:, :, number * 5 : (number + 1) * 5]
        np.testing.assert_array_equal(block[..., : expected.shape[-1]], expected)
        assert np.all(block[..., expected.shape[-1] :] == 0)
    if num_entries >= size:
        np.testing.assert_array_equal(join_blocks(jnp.asarray(blocks), num_entries), k_BKHS)


@pytest.mark.parametrize(
    ("num_entries", "expected"),
    [
        (192, (3 * 8, 64)),
        (144, (5 * 8, 32)),
        (100, (2 * 8, 64)),
        (64, (8, 64)),
        (48, (2 * 8, 32)),
        (32, (8, 32)),
        (31, (8, 31)),
    ],
)
def test_blocks_leave_the_least_room(num_entries, expected):
    assert blocks_shape(8, num_entries, CPU_BLOCKS) == expected


def test_without_sizes_there_is_one_block():
    assert blocks_shape(8, 192, ()) == (8, 192)
