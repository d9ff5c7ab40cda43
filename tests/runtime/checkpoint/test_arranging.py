"""Arranging: values only move."""

import numpy as np
import pytest

from noria.modelzoo.config import AS_PUBLISHED, Arrangement
from noria.runtime.checkpoint.orbax_store import concerns, to_arrangement

K, G, H, D, V = 3, 4, 2, 6, 11
SHAPES = {
    "embedding.table": (V, D),
    "head.table": (V, D),
    "layers.0.attention.qkv": (D, K, G + 2, H),
    "layers.0.attention.qkv_bias": (K, G + 2, H),
    "layers.0.attention.output": (K, G, H, D),
    "layers.0.attention.output_bias": (D,),
    "layers.0.attention.sinks": (K, G),
    "layers.0.mlp.down": (5, D),
}
ARRANGEMENTS = [AS_PUBLISHED, Arrangement(2), Arrangement(4), Arrangement(1, 16), Arrangement(2, V)]


def array(parameter):
    shape = SHAPES[parameter]
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
def test_parameters_that_are_not_concerned_stay_the_same_object(arrangement):
    for parameter in SHAPES:
        x = array(parameter)
        if not concerns(arrangement, parameter):
            assert to_arrangement(x, parameter, arrangement) is x


def test_copies_stand_side_by_side_and_queries_keep_their_order():
    x_DKJH = array("layers.0.attention.qkv")
    got = to_arrangement(x_DKJH, "layers.0.attention.qkv", Arrangement(2))
    assert got.shape == (D, 2 * K, G // 2 + 2, H)
    np.testing.assert_array_equal(got[:, 2, :2], x_DKJH[:, 1, :2])
    np.testing.assert_array_equal(got[:, 3, :2], x_DKJH[:, 1, 2:4])
    for copy in (2, 3):
        np.testing.assert_array_equal(got[:, copy, 2:], x_DKJH[:, 1, 4:])
