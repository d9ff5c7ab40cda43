"""Arranging: values only move, the way back is exact, and other shapes find a place on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from noria.modelzoo.config import AS_PUBLISHED, Arrangement, DecoderConfig
from noria.runtime.checkpoint.arranging import (
    concerns,
    sharding_for,
    to_arrangement,
    to_canonical,
)

K, G, H, D, V = 3, 4, 2, 6, 11
CONFIG = DecoderConfig(
    vocab_size=V,
    embed=D,
    mlp=5,
    num_query_heads=K * G,
    num_kv_heads=K,
    head_dim=H,
    windows=(None,),
    max_position=64,
)
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
@pytest.mark.parametrize("parameter", SHAPES)
@pytest.mark.parametrize("library", [np, jnp], ids=["numpy", "jax"])
def test_the_way_back_is_exact(library, parameter, arrangement):
    x = library.asarray(array(parameter))
    there = to_arrangement(x, parameter, arrangement)
    back = to_canonical(there, parameter, arrangement, CONFIG)
    assert type(back) is type(x) and back.dtype == x.dtype
    np.testing.assert_array_equal(back, x)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS, ids=str)
def test_parameters_that_are_not_concerned_stay_the_same_object(arrangement):
    for parameter in SHAPES:
        x = array(parameter)
        if not concerns(arrangement, parameter):
            assert to_arrangement(x, parameter, arrangement) is x
            assert to_canonical(x, parameter, arrangement, CONFIG) is x


def test_copies_stand_side_by_side_and_queries_keep_their_order():
    x_DKJH = array("layers.0.attention.qkv")
    got = to_arrangement(x_DKJH, "layers.0.attention.qkv", Arrangement(2))
    assert got.shape == (D, 2 * K, G // 2 + 2, H)
    np.testing.assert_array_equal(got[:, 2, :2], x_DKJH[:, 1, :2])
    np.testing.assert_array_equal(got[:, 3, :2], x_DKJH[:, 1, 2:4])
    for copy in (2, 3):
        np.testing.assert_array_equal(got[:, copy, 2:], x_DKJH[:, 1, 4:])


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ("layers.0.attention.qkv", r"expected axes of \(6, 4\) .* got \(3, 6\)"),
        ("layers.0.attention.output", r"expected axes of \(6, 2\) .* got \(3, 4\)"),
        ("head.table", r"expected axes of \(16,\) .* got \(11,\)"),
    ],
)
def test_an_array_of_another_arrangement_is_refused(parameter, message):
    with pytest.raises(ValueError, match=message):
        to_canonical(array(parameter), parameter, Arrangement(2, 16), CONFIG)


@pytest.mark.parametrize(
    ("shape", "wanted", "got"),
    [
        ((8, 2, 4), (None, "data"), (("data",), (), ())),
        ((8, 4, 4), ("tensor", "data"), (("tensor",), ("data",), ())),
        ((8, 2, 4), (None, ("tensor", "data")), (("data",), ("tensor",), ())),
        ((11, 6), (("data", "tensor"),), ((), ("tensor",))),
        ((11, 7), ("data",), ((), ())),
        ((7, 8), ("data", "tensor"), ((), ("tensor", "data"))),
    ],
)
def test_mesh_axes_that_do_not_divide_move_or_are_left_out(shape, wanted, got):
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    found = sharding_for(shape, NamedSharding(mesh, PartitionSpec(*wanted)))
    assert found == NamedSharding(mesh, PartitionSpec(*got))
    found.shard_shape(shape)


def test_the_sharding_of_one_device_is_kept():
    device = SingleDeviceSharding(jax.devices()[3])
    assert sharding_for((3, 5), device) is device
