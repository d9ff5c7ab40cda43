"""One product over a mesh: the collectives of literal examples, and answers of random examples.

Placements are written as in the scaling book, `B_data T D_tensor`; mesh axes of one dimension are
joined by a plus, `D_data+tensor`. Values are small integers, so that every sum is exact.
"""

import random
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from noria.sharding.projection import Projection

MESH_AXES = ("data", "sequence", "tensor")
EQUATION = "BTD,DF->BTF"
RNG = np.random.default_rng(0)
X_BTD = RNG.integers(-3, 4, (8, 8, 8)).astype(np.float32)
W_DF = RNG.integers(-3, 4, (8, 8)).astype(np.float32)


def placed(text: str) -> tuple[tuple[str, ...], ...]:
    """Parse `B_data T D_data+tensor` as (("data",), (), ("data", "tensor"))."""
    parts = [dimension.partition("_")[2] for dimension in text.split()]
    return tuple(tuple(filter(None, part.split("+"))) for part in parts)


def moves(x: str, stored: str, used: str, out: str) -> dict[str, object]:
    """Return the steps of a projection of `EQUATION`, without the empty steps."""
    steps = vars(Projection.from_mesh_axes(EQUATION, *map(placed, (x, stored, used, out))))
    return {name: step for name, step in steps.items() if name != "partial_split" and any(step)}


def test_a_product_is_made_as_its_operands_lie_before_anything_is_summed():
    arrays = ("B_data T D_tensor", "D_tensor F", "D_tensor F", "B_data T_tensor F")
    assert Projection.from_mesh_axes(EQUATION, *map(placed, arrays)).partial_split == (
        ("data",),
        (),
        (),
    )


@pytest.mark.parametrize(
    ("x", "stored", "used", "out", "expected"),
    [
        ("B_data T D", "D F_tensor", "D F_tensor", "B_data T F_tensor", {}),
        ("B T D_tensor", "D_tensor F", "D_tensor F", "B T F", {"sum_over": ("tensor",)}),
        (
            "B T D_tensor",
            "D_tensor F",
            "D_tensor F",
            "B T_tensor F",
            {"scatter": ((), ("tensor",), ())},
        ),
        (
            "B T_tensor D",
            "D F_tensor",
            "D F_tensor",
            "B T F_tensor",
            {"gather_x": ((), ("tensor",), ())},
        ),
        (
            "B T D_tensor",
            "D F_tensor",
            "D F_tensor",
            "B T F_tensor",
            {"gather_x": ((), (), ("tensor",))},
        ),
        (
            "B T D_data",
            "D_data F_tensor",
            "D_data F_tensor",
            "B T F_tensor",
            {"sum_over": ("data",)},
        ),
        (
            "B_data T D",
            "D_data F_tensor",
            "D F_tensor",
            "B_data T F_tensor",
            {"gather_weight": (("data",), ())},
        ),
        (
            "B_data T D",
            "D F_data+tensor",
            "D F_data+tensor",
            "B T F_data+tensor",
            {"gather_x": (("data",), (), ())},
        ),
        (
            "B T D",
            "D_tensor F",
            "D_tensor F",
            "B_data T F",
            {
                "cut_x": ((), (), ("tensor",)),
                "sum_over": ("tensor",),
                "cut_out": (("data",), (), ()),
            },
        ),
    ],
    ids=[
        "columns",
        "rows",
        "rows to pieces of tokens",
        "pieces of tokens to columns",
        "pieces of embed to columns",
        "two-dimensional",
        "gathered weight",
        "rows meet a vocabulary over the same axis",
        "whole activations to rows",
    ],
)
def test_a_product_moves_what_it_must(x, stored, used, out, expected):
    assert moves(x, stored, used, out) == expected


@pytest.mark.parametrize(
    ("weight", "out", "expected"),
    [
        (
            "D_data F_tensor",
            "B T F_data",
            {"gather_out": ((), (), ("tensor",)), "cut_out": ((), (), ("data",))},
        ),
        (
            "D_data F_tensor",
            "B T F_sequence+data",
            {"gather_out": ((), (), ("tensor",)), "cut_out": ((), (), ("sequence", "data"))},
        ),
        ("D_data F", "B T F_tensor+data", {"cut_out": ((), (), ("tensor", "data"))}),
    ],
    ids=["other pieces", "other and finer pieces", "pieces of pieces"],
)
def test_partial_sums_are_scattered_only_where_pieces_come_out_in_order(weight, out, expected):
    """A scatter before a gather or slice of the same dimension would order its pieces wrongly."""
    found = moves("B T D_data", weight, weight, out)
    assert found == {"sum_over": ("data",), **expected}


@cache
def mesh() -> Mesh:
    devices = np.array(jax.devices()).reshape(2, 2, 2)
    return Mesh(devices, MESH_AXES, axis_types=(AxisType.Auto,) * 3)


def random_split(rng: random.Random, num_dimensions: int) -> tuple[tuple[str, ...], ...]:
    """Draw mesh axes in random order, each in one dimension or none."""
    dimensions: list[tuple[str, ...]] = [()] * (num_dimensions + 1)
    for axis in rng.sample(MESH_AXES, len(MESH_AXES)):
        i = rng.randrange(num_dimensions + 1)
        dimensions[i] = (*dimensions[i], axis)
    return tuple(dimensions[:num_dimensions])


def spec(dimensions: tuple[tuple[str, ...], ...]) -> P:
    return P(*(axes or None for axes in dimensions))


@pytest.mark.parametrize(
    "seeds", [range(16), pytest.param(range(16, 300), marks=pytest.mark.slow)], ids=str
)
def test_any_placement_gives_the_product(seeds):
    expected_BTF = np.einsum(EQUATION, X_BTD, W_DF)
    for seed in seeds:
        rng = random.Random(seed)
        x, stored, out = (random_split(rng, n) for n in (3, 2, 3))
        used = tuple(axes[: rng.randrange(len(axes) + 1)] for axes in stored)
        projection = Projection.from_mesh_axes(EQUATION, x, stored, used, out)
        got_BTF = multiply(projection, spec(x), spec(stored), spec(out))
        assert (got_BTF == expected_BTF).all(), (x, stored, used, out)


def multiply(projection: Projection, x: P, stored: P, out: P) -> np.ndarray:
    def local(x_BTD: jax.Array, w_DF: jax.Array) -> jax.Array:
        return projection.reduce(jnp.einsum(EQUATION, *projection.prepare(x_BTD, w_DF)))

    product = jax.shard_map(
        local, mesh=mesh(), in_specs=(x, stored), out_specs=out, check_vma=False
    )
    return np.asarray(jax.jit(product)(X_BTD, W_DF))
