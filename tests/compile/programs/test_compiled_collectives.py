"""Collectives of compiled programs, for simulated CPU devices and for absent TPUs.

The tests show that real text has the form of the snippets in test_collectives.py. They also show
how compilers change collectives: combined, scattered, or overlapped with a product.
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from noria.compile.programs.collectives import Collective, read_collectives

SIZES = {"data": 2, "tensor": 4}
X = P("data", "tensor")
BYTES = 128 * 256 * 4
"""Bytes of one device's piece of f32[256,1024]."""


def tpu_devices(topology: str) -> list:
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


TARGETS = {"cpu": jax.devices, "tpu": partial(tpu_devices, "v5e:2x4")}
ON_BOTH = pytest.mark.parametrize(
    "target", ["cpu", pytest.param("tpu", marks=pytest.mark.tpu_compile)]
)


def build_mesh(devices: list) -> Mesh:
    array = np.array(devices).reshape(2, -1)
    return Mesh(array, tuple(SIZES), axis_types=(AxisType.Auto,) * 2)


def compiled(function, mesh: Mesh, *arguments: tuple[tuple[int, ...], P], dtype=jnp.float32) -> str:
    """Compile `function` for arguments of these shapes and placements; return the text."""
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, spec in arguments
    ]
    return jax.jit(function).lower(*shapes).compile().as_text() or ""


def read_local(function, out: P, target: str, dtype=jnp.float32) -> list[Collective]:
    """Compile a function of one device's piece of f32[256,1024] and read its collectives."""
    mesh = build_mesh(TARGETS[target]())
    mapped = jax.shard_map(function, mesh=mesh, in_specs=X, out_specs=out, check_vma=False)
    return read_collectives(compiled(mapped, mesh, ((256, 1024), X), dtype=dtype), SIZES)


@ON_BOTH
@pytest.mark.parametrize(
    ("function", "out", "expected"),
    [
        (lambda x: lax.psum(x, "tensor"), P("data"), ("all-reduce", ("tensor",), BYTES)),
        (lambda x: lax.psum(x, tuple(SIZES)), P(), ("all-reduce", ("data", "tensor"), BYTES)),
        (
            lambda x: lax.psum_scatter(x, "tensor", tiled=True),
            X,
            ("reduce-scatter", ("tensor",), BYTES),
        ),
        (
            lambda x: lax.all_gather(x, "data", tiled=True),
            P(None, "tensor"),
            ("all-gather", ("data",), 2 * BYTES),
        ),
        (
            lambda x: lax.all_to_all(x, "tensor", 0, 1, tiled=True),
            X,
            ("all-to-all", ("tensor",), BYTES),
        ),
        (
            lambda x: lax.ppermute(x, "data", [(0, 1), (1, 0)]),
            X,
            ("collective-permute", ("data",), BYTES),
        ),
    ],
    ids=["psum", "psum-both", "psum_scatter", "all_gather", "all_to_all", "ppermute"],
)
def test_a_collective_of_a_mapped_function_is_read_as_it_was_written(
    target, function, out, expected
):
    (found,) = read_local(function, out, target)
    assert (found.kind, found.mesh_axes, found.num_bytes) == expected
    assert found.source.startswith("jit(<lambda>)/shard_map/")


@ON_BOTH
def test_loops_multiply(target):
    def inner(x, _):
        return lax.ppermute(x, "data", [(0, 1), (1, 0)]) + 1, None

    def outer(x, _):
        return lax.psum(lax.scan(inner, x, length=3)[0], "tensor") / 2, None

    found = read_local(lambda x: lax.scan(outer, x, length=4)[0], X, target)
    assert {one.kind: (one.loops, one.times) for one in found} == {
        "collective-permute": ((4, 3), 12),
        "all-reduce": ((4,), 4),
    }


@ON_BOTH
def test_a_loop_of_open_length_counts_one_turn(target):
    def until(x):
        return lax.while_loop(lambda y: y.sum() < 9, lambda y: lax.psum(y, "tensor") + 1, x)

    (found,) = read_local(until, X, target)
    assert (found.loops, found.times) == ((None,), 1)


@ON_BOTH
def test_collectives_that_the_compiler_combines_are_one(target):
    mesh = build_mesh(TARGETS[target]())
    function = jax.shard_map(
        lambda x, y: (lax.psum(x, "tensor"), lax.psum(y, "tensor")),
        mesh=mesh,
        in_specs=(X, X),
        out_specs=P("data"),
        check_vma=False,
    )
    text = compiled(function, mesh, ((256, 1024), X), ((16, 1024), X))
    (found,) = read_collectives(text, SIZES)
    assert (len(found.arrays), found.num_bytes) == (2, BYTES + 8 * 256 * 4)


@pytest.mark.tpu_compile
def test_a_collective_moves_half_the_bytes_in_bfloat16():
    (found,) = read_local(lambda x: lax.psum(x, "tensor"), P("data"), "tpu", dtype=jnp.bfloat16)
    assert found.num_bytes == BYTES // 2


def described(text: str) -> list[tuple]:
    found = read_collectives(text, SIZES)
    return [(one.kind, one.mesh_axes, one.times, one.num_bytes) for one in found]


@ON_BOTH
def test_a_constrained_product_is_scattered_on_the_tpu_alone(target):
    mesh = build_mesh(TARGETS[target]())
    text = compiled(
        lambda x, w: lax.with_sharding_constraint(x @ w, NamedSharding(mesh, X)),
        mesh,
        ((512, 4096), X),
        ((4096, 1024), P("tensor", None)),
    )
    kind = "reduce-scatter" if target == "tpu" else "all-reduce"
    assert described(text) == [(kind, ("tensor",), 1, 256 * 1024 * 4)]


@pytest.mark.tpu_compile
def test_a_gather_beside_a_product_counts_once_though_it_is_written_thrice():
    mesh = build_mesh(TARGETS["tpu"]())
    function = jax.shard_map(
        lambda x, y: (lax.all_gather(x, "tensor", tiled=True) * 2, jnp.tanh(y @ y.T)),
        mesh=mesh,
        in_specs=(X, P()),
        out_specs=(P("data"), P()),
        check_vma=False,
    )
    arguments = ((8192, 16384), X), ((4096, 4096), P())
    text = compiled(function, mesh, *arguments, dtype=jnp.bfloat16)
    assert text.count(" all-gather(") == 3
    assert described(text) == [("all-gather", ("tensor",), 1, 16384 * 4096 * 2)]


@pytest.mark.parametrize(
    "devices",
    [
        lambda: [jax.devices()[position] for position in (3, 1, 7, 5, 0, 2, 6, 4)],
        pytest.param(partial(tpu_devices, "v5e:4x4"), marks=pytest.mark.tpu_compile),
    ],
    ids=["cpu", "tpu"],
)
def test_groups_are_positions_in_the_mesh_whatever_the_ids_of_its_devices(devices):
    mesh = build_mesh(devices())
    ids = [device.id for device in mesh.devices.flat]
    assert ids != sorted(ids)
    function = jax.shard_map(
        lambda x: lax.psum(x, "tensor"), mesh=mesh, in_specs=X, out_specs=P("data")
    )
    text = compiled(function, mesh, ((256, 1024), X))
    (found,) = read_collectives(text, dict(mesh.shape))
    assert (found.mesh_axes, found.group_size) == (("tensor",), len(ids) // 2)
