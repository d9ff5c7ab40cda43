"""Tables in blocks, of which equal ones are stored once."""

import numpy as np

from noria.runtime.structured.token_automaton import Blocks


def test_rows_are_the_blocks_of_their_numbers():
    draw = np.random.default_rng(0)
    blocks, rows_RX = Blocks(4, np.int16), draw.integers(0, 2, (20, 10)).astype(np.int16)
    numbers_RJ = blocks.add(rows_RX)
    found = blocks.stacked()[numbers_RJ].reshape(20, 12)
    assert (found[:, :10] == rows_RX).all()
    assert not found[:, 10:].any()
    assert blocks.stacked().dtype == np.int16
    # of two values in four places there are 16
    assert len(blocks) == len(blocks.stacked()) <= 16


def test_equal_blocks_have_the_number_of_the_first():
    blocks = Blocks(2, np.uint8)
    assert blocks.add(np.array([[1, 2, 0, 0], [3, 4, 1, 2]])).tolist() == [[1, 0], [2, 1]]
    assert blocks.add(np.array([[3, 4, 5]])).tolist() == [[2, 3]]
    assert len(blocks) == 4
